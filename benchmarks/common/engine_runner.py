"""This side: the engine as a user drives it, texts and the event log included."""

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


class Ours:
    """An engine whose runs start cold: each run has a cache salt of its own, which keeps it from
    hitting what earlier runs left in the prefix cache and the encoder cache. Without a `config` nobody
    drafts: what drafts give is measured by spec.py."""

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
        """Tokens of every answer; all requests are there from the start."""
        return self.begin(asks).finish()

    def begin(self, asks: Sequence[Ask], salt: str = "", *, plain: bool = False) -> "Running":
        """Submit `asks`. Runs with the same `salt` share caches; without one a run is cold. An end of
        sequence is suppressed; if `plain` it is sampled and ignored, which costs nothing."""
        return Running(self.engine, asks, salt or f"cold {next(self._salts)}", plain)

    def first_tokens(self, asks: Sequence[Ask]) -> list[float]:
        """Seconds from submit to first token of requests that come one after the other."""
        salt = f"cold {next(self._salts)}"
        return [_until_first(self.engine, lambda ask=ask: _submit(self.engine, ask, salt)) for ask in asks]

    def first_tokens_of_files(self, image: Path, questions: Sequence[str]) -> list[float]:
        """The same for questions about an image file, which is read and prepared within the time."""
        seconds = []
        for question in questions:
            content = [{"type": "image", "image": str(image)}, {"type": "text", "text": question}]
            prompt = Prompt(messages=[{"role": "user", "content": content}])
            seconds.append(_until_first(self.engine, lambda p=prompt: self.engine.submit(p, max_tokens=2)))
        return seconds

    def close(self) -> None:
        self.engine.close()


class Running:
    """Requests on their way. Nothing else may run in the engine meanwhile."""

    def __init__(self, engine: Engine, asks: Sequence[Ask], salt: str, plain: bool) -> None:
        self._engine = engine
        self._places = {_submit(engine, ask, salt, plain): place for place, ask in enumerate(asks)}
        self._answers: list[list[int]] = [[] for _ in asks]
        self._decoding = False  # whether the last step gave every row a token and ended none

    def _step(self) -> int:
        """How many rows made tokens, none when one of them ended."""
        outputs = self._engine.step()
        ended = [output for output in outputs if output.completion is not None]
        for output in ended:
            self._answers[self._places[output.request_id]] = output.completion.token_ids
        return 0 if ended else len(outputs)

    def start(self) -> Sample:
        """Steps until every row made a token in one step; what they took."""

        def until_all() -> None:
            while not self._decoding:
                if not self._engine.has_work:
                    raise RuntimeError("no step gave every row a token: is the KV pool too small for all?")
                self._decoding = self._step() == len(self._answers)

        return clocked(until_all)[0]

    def steps(self, most: int) -> list[Sample]:
        """Up to `most` steps after `start` in which every row made one token."""
        samples = []
        while self._decoding and len(samples) < most:
            sample, made = clocked(self._step)
            self._decoding = made == len(self._answers)
            if self._decoding:
                samples.append(sample)
        return samples

    def finish(self) -> list[list[int]]:
        """Run to the end; the tokens of every answer."""
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
