"""This side: the engine as a user drives it, one thread, texts and the event log included."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from workload import Ask

from mmengine.request import SamplingParams
from mmengine.serve.engine import Engine
from mmengine.serve.prompts import Options


@dataclass(slots=True)
class DecodeRun:
    """Steps in which every row made one token. Per step in seconds: the whole of Engine.step, the
    part of core.step in it, and the executor's part of that."""

    num_rows: int
    cpu: float = 0.0
    front: list[float] = field(default_factory=list)
    core: list[float] = field(default_factory=list)
    executor: list[float] = field(default_factory=list)


class Ours:
    """An engine whose runs start cold: each run has a cache salt of its own, which keeps it from
    hitting what earlier runs left in the prefix cache and the encoder cache."""

    def __init__(self, log: Path | None = None) -> None:
        self.engine = Engine(device="cpu", dtype="float32", log=log)
        self._salts = count()
        self._core_seconds = 0.0
        self._time_core()

    def _time_core(self) -> None:
        core = self.engine.built.core
        step = core.step

        def timed():
            begin = time.perf_counter()
            outputs = step()
            self._core_seconds = time.perf_counter() - begin
            return outputs

        core.step = timed

    def _submit(self, ask: Ask, salt: str) -> str:
        sampling = SamplingParams(max_tokens=ask.num_new, min_tokens=ask.num_new, seed=0)
        return self.engine.submit_prepared(ask.prepared, Options(sampling, cache_salt=salt), stream=False)

    def answer(self, asks: Sequence[Ask]) -> list[list[int]]:
        """Tokens of every answer; all requests are there from the start."""
        salt = str(next(self._salts))
        places = {self._submit(ask, salt): place for place, ask in enumerate(asks)}
        answers: list[list[int]] = [[] for _ in asks]
        while self.engine.has_work:
            for output in self.engine.step():
                if output.completion is not None:
                    answers[places[output.request_id]] = output.completion.token_ids
        return answers

    def first_tokens(self, asks: Sequence[Ask]) -> list[float]:
        """Seconds from submit to first token of requests that come one after the other."""
        salt = str(next(self._salts))
        seconds = []
        for ask in asks:
            begin = time.perf_counter()
            self._submit(ask, salt)
            while not any(output.token_ids for output in self.engine.step()):
                pass
            seconds.append(time.perf_counter() - begin)
            while self.engine.has_work:
                self.engine.step()
        return seconds

    def decode(self, asks: Sequence[Ask]) -> DecodeRun:
        """The steps of a run in which all of `asks` made one token each and none ended."""
        salt = str(next(self._salts))
        for ask in asks:
            self._submit(ask, salt)
        run = DecodeRun(len(asks))
        stats = self.engine.stats
        decoding = False
        while self.engine.has_work:
            device_ns, cpu, begin = stats().device_ns, time.process_time(), time.perf_counter()
            outputs = self.engine.step()
            seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
            whole = len(outputs) == len(asks) and all(output.finish_reason is None for output in outputs)
            if decoding and whole:
                run.front.append(seconds)
                run.core.append(self._core_seconds)
                run.executor.append((stats().device_ns - device_ns) / 1e9)
                run.cpu += cpu
            decoding = whole
        return run

    def close(self) -> None:
        self.engine.close()
