"""Batches on Ray Data: workers with logs, of which each dead one costs only what it had not computed.

    ray.data.read_text("requests.jsonl").map_batches(AnswerLines, fn_constructor_kwargs={"root": "logs"}, …)

Ray gives the rows of a worker that died to another one, as a whole batch. That one looks into the logs below
`root` that nobody writes any more: an answer that stands there is taken, one that was begun goes on behind
its tokens. A request without a seed has one by its id, so that it is the same request wherever it runs. It is
known by its whole line, of which the log has a digest: another request may have its id, or another job.
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

if TYPE_CHECKING:  # it brings torch
    from mmengine.build import Built

Batch = dict[str, np.ndarray]


class AnswerLines:
    """For `map_batches`: a column `text` of request lines, as `mmengine run --batch` reads them, becomes a
    column `text` of answer lines. `root`: the folder of the workers' logs, which all of them see.
    `base_folder`: from where paths of media are read. `engine`: settings. `builder`: module:function in place
    of mmengine.build.build. Raises what Engine does."""

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
        made_by = _imported(builder) if builder else None
        self._engine = Engine(model, config=config, log=self._log, builder=made_by)
        self._left: dict[bytes, ResumedAnswer] = {}  # of the dead, by what was asked
        self._read: set[Path] = {self._log}
        self._told: list[str] = []  # that the batch before gave, and Ray has by now

    def __call__(self, batch: Batch) -> Batch:
        for request_id in self._told:
            self._engine.requests.delivered(request_id)
        self._told = []
        self._look_at_the_dead()
        lines = "\n".join(str(line) for line in batch["text"]).encode()
        jobs = _Jobs(lines, self._base_folder, self._left, self._engine)
        answers: dict[int, bytes] = {}
        for place, answer in run_batch(self._engine, jobs, received=False):
            answers[place] = jobs.file.answer_line(place, jobs.done.get(place, answer))
            if isinstance(answer, Completion):
                self._told.append(answer.request_id)
        texts = [answers[place].decode().rstrip("\n") for place in sorted(answers)]
        return {"text": np.array(texts, dtype=object)}

    def _look_at_the_dead(self) -> None:
        """Into logs that nobody writes, once each."""
        for log in sorted(self._root.iterdir()):
            if log in self._read or not log.is_dir():
                continue
            try:
                if not segment_paths(log) or is_locked(log):
                    continue
                found = read_resume_state(log, Resume())
            except (LogError, OSError) as error:  # then all of it is computed again
                operator_log.warning("a log of before cannot be read", log=log.name, reason=str(error))
            else:  # of another model it would say other tokens
                if found.last_fingerprints == self._engine.built.core.fingerprints:
                    self._left |= {each.queued.envelope: each for each in found.answers.values()}
            self._read.add(log)


class _Jobs:
    """Jobs of `lines`, from where the dead came. `done`: by place, the answers that they gave whole."""

    def __init__(self, lines: bytes, base_folder: Path, left: dict[bytes, ResumedAnswer], engine: Engine):
        self.file = RequestFile(io.BytesIO(lines), base_folder)
        self._lines, self._base_folder, self._left, self._engine = lines, base_folder, left, engine
        self.done: dict[int, Completion | MMEngineError] = {}

    def __iter__(self) -> Iterator[Job | MMEngineError | AnsweredJob]:
        lines = (line for _, line in numbered_lines(io.BytesIO(self._lines)))
        for place, (job, line) in enumerate(zip(self.file, lines, strict=True)):
            if not isinstance(job, tuple) or isinstance(job, AnsweredJob):
                yield job
                continue
            prompt, options = job[0], replace(_seeded(job[1]), envelope=self._asked(line or b""))
            left = self._left.get(options.envelope)
            if left is None or left.was_given_up or options.sampling.n != 1:
                yield prompt, options
            elif left.reason:
                self.done[place] = _whole(options.request_id, left, self._engine)
                yield MMEngineError("it is done")
            elif options.sampling.logprobs is not None or options.sampling.prompt_logprobs is not None:
                yield prompt, options  # what was told of the first tokens is not here
            else:
                yield prompt, replace(options, outputs=list(left.token_ids))

    def _asked(self, line: bytes) -> bytes:
        """The same for the same request alone, whose media stand below the same folder."""
        digest = hashlib.blake2b(b"%s\0" % os.fsencode(self._base_folder), digest_size=16)
        digest.update(line)
        return msgspec.json.encode({"api": "batch", "digest": digest.hexdigest()})


def _seeded(options: Options) -> Options:
    if options.sampling.seed is not None:
        return options
    digest = hashlib.blake2b(options.request_id.encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "little") >> 1
    return replace(options, sampling=msgspec.structs.replace(options.sampling, seed=seed))


def _whole(request_id: str, left: ResumedAnswer, engine: Engine) -> Completion:
    stops = Stops.of(left.queued.sampling, left.queued.grammar)
    choice = Choice(
        0, "", list(left.token_ids), left.reason, left.detail, left.logprobs, stops.after, code=left.code
    )
    prompt = np.frombuffer(left.queued.prompt, np.int32)
    return Completion(request_id, prompt, [with_texts(choice, engine.processor.tokenizer, stops)])


def _imported(path: str) -> "Callable[..., Built]":
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
