"""Answers batches on Ray Data. Workers have logs, so that a worker's death loses little work.

    ray.data.read_text("requests.jsonl").map_batches(AnswerLines, fn_constructor_kwargs={"root": "logs"}, …)

Ray gives the whole batch of a dead worker to a new worker. The new worker reads the logs of dead workers
below `root`. It takes finished answers from these logs, and continues unfinished answers. A request without a
seed gets a seed derived from its id; every worker then computes the same answer. The log identifies a request
by a digest over its line and media folder, because ids may be reused.
"""

import hashlib
import io
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from mmengine.config import EngineConfig
from mmengine.core.resume import Resume, read_resume_state
from mmengine.core.undelivered_answers import ResumedAnswer
from mmengine.errors import LogError, MMEngineError
from mmengine.events.lock import is_locked
from mmengine.events.segment import segment_paths
from mmengine.serve.batch.request_file import RequestFile, numbered_lines
from mmengine.serve.batch.run_batch import AnsweredJob, Job, run_batch
from mmengine.serve.engine.engine import Engine
from mmengine.serve.prompt.options import Options
from mmengine.serve.requests.operator_log import operator_log
from mmengine.serve.text.detokenizer import Stops
from mmengine.serve.text.output_text import with_texts
from mmengine.serve.text.request_output import Choice, Completion
from mmengine.token_confidence import split_entries

if TYPE_CHECKING:  # importing mmengine.build imports torch
    from mmengine.build import Built

Batch = dict[str, np.ndarray]


class AnswerLines:
    """A callable for `map_batches`: turns a column `text` with request lines into a column with answer lines.

    The lines have the format of `mmengine run --batch`. `root`: the folder of all workers' logs, which every
    worker must see. `base_folder`: the folder of relative media paths. `engine`: engine settings. `builder`:
    module:function that replaces mmengine.build.build. Raises the same errors as Engine does.
    """

    def __init__(
        self,
        root: str,
        model: str | None = None,
        engine: Mapping[str, object] | None = None,
        base_folder: str = ".",
        builder: str = "",
    ):
        self._root, self._base_folder = Path(root), Path(base_folder)
        self._log = self._root / f"worker-{os.getpid()}-{secrets.token_hex(4)}"
        config = msgspec.convert(dict(engine or {}), EngineConfig)
        make_built = _imported(builder) if builder else None
        self._engine = Engine(model, config=config, log=self._log, builder=make_built)
        # unfinished and undelivered answers of dead workers, by envelope
        self._earlier: dict[bytes, ResumedAnswer] = {}
        self._read: set[Path] = {self._log}
        self._answered: list[str] = []  # requests of the previous batch, whose answers Ray has stored

    def __call__(self, batch: Batch) -> Batch:
        for request_id in self._answered:
            self._engine.requests.delivered(request_id)
        self._answered = []
        self._read_earlier_logs()
        lines = "\n".join(str(line) for line in batch["text"]).encode()
        jobs = _Jobs(lines, self._base_folder, self._earlier, self._engine)
        answers: dict[int, bytes] = {}
        for place, answer in run_batch(self._engine, jobs, received=False):
            answers[place] = jobs.file.answer_line(place, jobs.done.get(place, answer))
            if isinstance(answer, Completion):
                self._answered.append(answer.request_id)
        texts = [answers[place].decode().rstrip("\n") for place in sorted(answers)]
        return {"text": np.array(texts, dtype=object)}

    def _read_earlier_logs(self) -> None:
        """Read the logs of dead workers, each log once."""
        for log in sorted(self._root.iterdir()):
            if log in self._read or not log.is_dir():
                continue
            try:
                if not segment_paths(log) or is_locked(log):
                    continue
                found = read_resume_state(log, Resume())
            except (LogError, OSError) as error:  # the requests in this log are computed again
                operator_log.warning("an earlier log cannot be read", log=log.name, reason=str(error))
            else:  # only answers from an engine with equal fingerprints are continued
                if found.last_fingerprints == self._engine.built.core.fingerprints:
                    self._earlier |= {each.queued.envelope: each for each in found.answers.values()}
            self._read.add(log)


class _Jobs:
    """The jobs for `lines`, continued from dead workers' logs. `done`: position -> a dead worker's completed
    answer.
    """

    def __init__(self, lines: bytes, base_folder: Path, earlier: dict[bytes, ResumedAnswer], engine: Engine):
        self.file = RequestFile(io.BytesIO(lines), base_folder)
        self._lines, self._base_folder, self._earlier, self._engine = lines, base_folder, earlier, engine
        self.done: dict[int, Completion | MMEngineError] = {}

    def __iter__(self) -> Iterator[Job | MMEngineError | AnsweredJob]:
        lines = (line for _, line in numbered_lines(io.BytesIO(self._lines)))
        for place, (job, line) in enumerate(zip(self.file, lines, strict=True)):
            if not isinstance(job, tuple) or isinstance(job, AnsweredJob):
                yield job
                continue
            prompt, options = job[0], replace(_seeded(job[1]), envelope=self._envelope(line or b""))
            resumed = self._earlier.get(options.envelope)
            if resumed is None or resumed.was_given_up or options.sampling.n != 1:
                yield prompt, options
            elif resumed.reason:
                self.done[place] = _completion_of(options.request_id, resumed, self._engine)
                yield MMEngineError("answered by an earlier worker")  # replaced by the answer in `done`
            elif options.sampling.logprobs is not None or options.sampling.prompt_logprobs is not None:
                yield prompt, options  # the answer starts again, because the log has no logprobs
            else:
                yield prompt, replace(options, outputs=list(resumed.token_ids))

    def _envelope(self, line: bytes) -> bytes:
        """Return an envelope that identifies the request and its media folder."""
        digest = hashlib.blake2b(b"%s\0" % os.fsencode(self._base_folder), digest_size=16)
        digest.update(line)
        return msgspec.json.encode({"api": "batch", "digest": digest.hexdigest()})


def _seeded(options: Options) -> Options:
    if options.sampling.seed is not None:
        return options
    digest = hashlib.blake2b(options.request_id.encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "little") >> 1
    return replace(options, sampling=msgspec.structs.replace(options.sampling, seed=seed))


def _completion_of(request_id: str, resumed: ResumedAnswer, engine: Engine) -> Completion:
    grammar = resumed.queued.grammar
    stops = Stops.of(resumed.queued.sampling, grammar)
    logprobs, confidences = split_entries(resumed.logprobs)
    choice = Choice(
        0,
        "",
        list(resumed.token_ids),
        resumed.reason,
        resumed.detail,
        logprobs,
        stops.after,
        code=resumed.code,
        confidences=confidences,
    )
    prompt = np.frombuffer(resumed.queued.prompt, np.int32)
    return Completion(request_id, prompt, [with_texts(choice, engine.processor.tokenizer, stops, grammar)])


def _imported(path: str) -> "Callable[..., Built]":
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
