"""Runs the whole engine in a comparison, including detokenization and the event log."""

import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from benchmarks.common.measure import Sample, clocked
from benchmarks.common.workload import Ask
from mmengine.config import EngineConfig
from mmengine.request import SamplingParams
from mmengine.serve.engine.engine import Engine
from mmengine.serve.prompt.options import Options
from mmengine.serve.prompt.prompt import Prompt


class EngineRunner:
    """An engine whose runs start cold.

    Each run uses a new cache salt, so no run hits blocks or encoder outputs that an earlier run cached.
    Without a `config` the engine uses no drafts.
    """

    def __init__(
        self,
        log: Path | None = None,
        *,
        model: Path | None = None,
        dtype: str = "float32",
        config: EngineConfig | None = None,
    ) -> None:
        self.engine = Engine(
            model, device="cpu", dtype=dtype, log=log, config=config or EngineConfig(spec="none")
        )
        self._salts = count()

    def answer(self, asks: Sequence[Ask]) -> list[list[int]]:
        """Return the tokens of every answer; all requests are submitted before the first step."""
        return self.begin(asks).finish()

    def begin(self, asks: Sequence[Ask], salt: str = "", *, plain: bool = False) -> "Running":
        """Submit `asks` and return the run.

        `salt`: runs with the same salt share caches; without a salt the run is cold. Without `plain`, the
        logits exclude the end-of-sequence token. With `plain`, the engine ignores a sampled end-of-sequence
        token, which is faster.
        """
        return Running(self.engine, asks, salt or f"cold {next(self._salts)}", plain)

    def first_tokens(self, asks: Sequence[Ask]) -> list[float]:
        """Return the seconds from submit to first token for requests that run one after another."""
        salt = f"cold {next(self._salts)}"
        return [_until_first(self.engine, lambda ask=ask: _submit(self.engine, ask, salt)) for ask in asks]

    def first_tokens_of_files(self, image: Path, questions: Sequence[str]) -> list[float]:
        """Return the seconds to the first token for each question about an image file, asked one after
        another. Each time includes reading and preparing the image.
        """
        seconds = []
        for question in questions:
            content = [{"type": "image", "image": str(image)}, {"type": "text", "text": question}]
            prompt = Prompt(messages=[{"role": "user", "content": content}])
            seconds.append(_until_first(self.engine, lambda p=prompt: self.engine.submit(p, max_tokens=2)))
        return seconds

    def close(self) -> None:
        self.engine.close()


class Running:
    """Submitted requests. Nothing else may use the engine while they run."""

    def __init__(self, engine: Engine, asks: Sequence[Ask], salt: str, plain: bool) -> None:
        self._engine = engine
        self._places = {_submit(engine, ask, salt, plain): place for place, ask in enumerate(asks)}
        self._answers: list[list[int]] = [[] for _ in asks]
        self._decoding = False  # Whether the last step gave every row a token and ended no row.

    def _step(self) -> int:
        """Run a step, and return how many rows got tokens, or 0 if a row ended."""
        outputs = self._engine.step()
        ended = [output for output in outputs if output.completion is not None]
        for output in ended:
            self._answers[self._places[output.request_id]] = output.completion.token_ids
        return 0 if ended else len(outputs)

    def start(self) -> Sample:
        """Run steps until a step gives every row a token, and return the time that the steps took."""

        def until_all() -> None:
            while not self._decoding:
                if not self._engine.has_work:
                    raise RuntimeError("no step gave every row a token: is the KV pool too small for all?")
                self._decoding = self._step() == len(self._answers)

        return clocked(until_all)[0]

    def steps(self, most: int) -> list[Sample]:
        """Run up to `most` further steps in which every row gets a token, and return each step's time."""
        samples = []
        while self._decoding and len(samples) < most:
            sample, made = clocked(self._step)
            self._decoding = made == len(self._answers)
            if self._decoding:
                samples.append(sample)
        return samples

    def finish(self) -> list[list[int]]:
        """Run to the end and return the tokens of every answer."""
        while self._engine.has_work:
            self._step()
        return self._answers


def _submit(engine: Engine, ask: Ask, salt: str, plain: bool = False) -> str:
    least = 0 if plain else ask.num_new
    sampling = SamplingParams(max_tokens=ask.num_new, min_tokens=least, ignore_eos=plain, seed=0)
    return engine.submit_prepared(ask.prepared, Options(sampling, cache_salt=salt), stream=False)


def _until_first(engine: Engine, submit) -> float:
    begin = time.perf_counter()
    submit()
    while not any(output.token_ids for output in engine.step()):
        pass
    seconds = time.perf_counter() - begin
    while engine.has_work:
        engine.step()
    return seconds
