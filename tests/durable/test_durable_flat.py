"""Tests that an engine's memory and log do not grow with past requests."""

import gc
import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import pytest

from mmengine.config import EngineConfig
from mmengine.events.log import LogReader
from mmengine.request import GrammarRequest, SamplingParams
from mmengine.serve.engine.engine import Engine
from mmengine.serve.prompt.options import Options
from mmengine.simulation.simulated_executor import SimulatedExecutor
from tests.serve import serve_fakes

SETTINGS = {
    "num_blocks": 2000,
    "max_model_len": 256,
    "max_num_seqs": 128,
    "max_waiting": 1000,
    "token_budget": 2048,
    "encoder_cache_size": 64,
}
OPEN = 200  # requests at a time
MANY, LIMIT_S = 1_000_000, 540.0


class Executor(SimulatedExecutor):
    """A simulated executor with the methods that Engine calls."""

    drafters: ClassVar[list] = []
    graph_counts: ClassVar[dict] = {}

    def __init__(self, watcher, fail_at):
        super().__init__(EngineConfig(**SETTINGS), vocab_size=256)

    def attach(self, request_id, media):
        pass

    def release(self, request_id):
        pass


@dataclass
class Callers:
    """Submits requests for short answers, each with a separate cache salt. Some have a grammar, and some are
    cancelled.
    """

    engine: Engine
    asked: int = 0
    done: set[str] = field(default_factory=set)
    num_done: int = 0

    def ask(self):
        number, self.asked = self.asked, self.asked + 1
        form = None
        if number % 5 == 0:
            form = GrammarRequest("regex", f"a{{{number}}}" + 300 * "b")
        options = Options(
            SamplingParams(max_tokens=2, seed=number),
            f"request {number}",
            cache_salt=str(number),
            grammar=form,
        )
        prompt = self.engine.processor.prepare_text(f"what is {number}?")
        self.engine.submit_prepared(prompt, options)
        if number % 9 == 0:
            self.engine.cancel(f"request {number}")

    def answer(self, count):
        """Submit requests until `count` in total are answered, then run the engine until it is idle."""
        while self.num_done < count:
            while self.asked < count and self.asked - self.num_done < OPEN:
                self.ask()
            for output in self.engine.step():
                self.num_done += output.completion is not None
        while self.engine.has_work:
            self.engine.step()
        gc.collect()


def engine_with(folder, **settings):
    build = serve_fakes.builder(executor_class=Executor, **SETTINGS, **settings)
    return Engine(builder=build, log=folder)


def test_ended_requests_leave_no_memory(tmp_path):
    with engine_with(tmp_path / "log") as engine:
        callers, blocks = Callers(engine), []
        for count in (1000, 2200, 3400, 4600):
            callers.answer(count)
            blocks.append(sys.getallocatedblocks())
    grown = [after - before for before, after in pairwise(blocks)]
    assert min(grown) < 300, f"each time 1,200 requests leave objects: {grown}"


def resident_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def num_bytes(folder):
    """Return a log's size in bytes. The writer may pack or delete segments meanwhile."""
    total = 0
    for path in folder.glob("*.mm*"):
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


@pytest.mark.soak
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc, which only Linux has")
def test_a_million_short_requests(tmp_path):
    """Run a million requests, or as many as nine minutes allow. The log keeps 16 MiB."""
    folder, begin = tmp_path / "log", time.monotonic()
    with engine_with(folder, log_retain_bytes=16 * 2**20) as engine:
        callers, at, kept = Callers(engine), {}, []
        for percent in range(5, 101, 5):
            callers.answer(MANY * percent // 100)
            at[callers.num_done] = resident_mb()
            kept.append(num_bytes(folder) / 1e6)
            print(f"{callers.num_done:,}: {at[callers.num_done]:.1f} MB, log {kept[-1]:.1f} MB", flush=True)
            if time.monotonic() - begin > LIMIT_S:
                break
        counts = list(at)
        tenth, half, whole = (at[counts[len(counts) * share // 100 - 1]] for share in (10, 50, 100))
    print(f"resident at 10 %, 50 %, 100 %: {tenth:.1f}, {half:.1f}, {whole:.1f} MB")
    assert callers.num_done >= MANY // 5
    assert whole - tenth < 8 and whole - half < 4
    assert max(kept) < 32 and LogReader(folder).first_sequence > MANY // 5
