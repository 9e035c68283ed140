"""Builds engines in the states that step_cost.py measures, and times their steps."""

import gc
import resource
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmengine.config import ENCODER_CACHE, EngineConfig
from mmengine.core import batch as planning
from mmengine.core import engine as loop
from mmengine.core.engine import EngineCore
from mmengine.core.executor import StepPlan, StepResult
from mmengine.events.log import LogWriter
from mmengine.request import Request, SamplingParams
from mmengine.simulation.traces import read_servegen

BLOCK = 16
MANY = 10**6
LENGTH = 1000
_CORE = ("schedule", "evolve", "append", "complete")


def percentile(values: Iterable[int], share: int) -> int:
    """Return a percentile by nearest rank."""
    ordered = sorted(values)
    return ordered[-(-len(ordered) * share // 100) - 1]


@dataclass(frozen=True, slots=True)
class Shape:
    """A workload. `num_drafts`: maximum number of drafts per row and step. `prefill`: long prompts arrive in
    chunks beside the decoding rows. `aligned`: all rows are at the same position in their KV blocks.
    `max_in_flight`: maximum number of steps in flight. `slots`: rows have recurrent states, and the prefix
    cache keeps some states in spare slots.
    """

    rows: int
    num_drafts: int = 0
    prefill: bool = False
    aligned: bool = False
    max_in_flight: int = 1
    slots: bool = False


class _Bare:
    __slots__ = ("computed", "known", "tokens")

    def __init__(self) -> None:
        self.computed = self.known = LENGTH
        self.tokens: list[int] = []


def bare_loop(rows: int, rounds: int) -> list[int]:
    """Return each round's time in ns. A round only adds a token to each row, the least work that a step could
    do in Python. Token counts begin at LENGTH, because CPython preallocates integers up to 256. With such
    small integers, the loop would be a quarter faster.
    """
    objects, tokens, times = [_Bare() for _ in range(rows)], list(range(rows)), []
    for _ in range(rounds):
        begin = time.thread_time_ns()
        for each, token in zip(objects, tokens, strict=True):
            each.computed += 1
            each.known += 1
            each.tokens.append(token)
        times.append(time.thread_time_ns() - begin)
    return times


class Instant:
    """An executor that runs no model and returns constant tokens. `spent_ns`: the executor's own CPU time."""

    needs_plan = True

    def __init__(self, num_drafts: int):
        self._num_drafts = num_drafts
        self._plans: deque[StepPlan] = deque()
        self._tokens = np.arange(65536, dtype=np.int32) % 30_000
        self.spent_ns = 0

    def dispatch(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def collect(self) -> StepResult:
        begin = time.thread_time_ns()
        plan = self._plans.popleft()
        count = len(plan.sample)
        result = self._drafted(plan, count) if self._num_drafts else StepResult(self._tokens[:count])
        self.spent_ns += time.thread_time_ns() - begin
        return result

    def _drafted(self, plan: StepPlan, count: int) -> StepResult:
        """Accept a varying number of drafts per row, and propose as many drafts as allowed."""
        counts = 1 + (np.arange(count, dtype=np.int32) + plan.step) % (plan.num_drafts[plan.sample] + 1)
        proposed = np.full(count, self._num_drafts, np.int32)
        return StepResult(
            self._tokens[: int(counts.sum())],
            counts=counts,
            drafts=self._tokens[: int(proposed.sum())],
            num_drafts=proposed,
        )

    def discard(self) -> None:
        self._plans.clear()

    def close(self) -> None:
        self._plans.clear()


class Bench:
    """An engine that writes a log to a new subfolder. `step` runs a step and returns its time in ns, less the
    executor's CPU time.
    """

    _number = 0

    def __init__(self, folder: Path, **settings: Any):
        Bench._number += 1
        self.config = EngineConfig(**{"max_waiting": MANY, "encoder_cache_size": ENCODER_CACHE, **settings})
        self.executor = Instant(self.config.num_draft_tokens)
        sink = LogWriter(folder / f"log-{Bench._number}")
        self.core = EngineCore(self.config, self.executor, sink=sink)
        self._num_asked = 0

    def ask(self, num_prompt: int, max_tokens: int = MANY) -> None:
        number = self._num_asked
        self._num_asked += 1
        prompt = (np.arange(num_prompt) * 31 + number * 977).astype(np.int32) % 30_000
        self.core.submit(Request(f"r{number}", prompt, SamplingParams(max_tokens=max_tokens, seed=0)))

    def step(self) -> int:
        spent, begin = self.executor.spent_ns, time.thread_time_ns()
        self.core.step()
        return time.thread_time_ns() - begin - (self.executor.spent_ns - spent)

    def close(self) -> None:
        self.core.close()


@contextmanager
def _phases(bench: Bench, into: dict[str, int]) -> Iterator[None]:
    """Add each phase's time inside the context, in ns, to `into`."""

    def timed(name: str, call: Callable) -> Callable:
        def run(*args: Any) -> Any:
            begin = time.thread_time_ns()
            try:
                return call(*args)
            finally:
                into[name] += time.thread_time_ns() - begin

        return run

    owners = {"evolve": loop, "batch": planning, "complete": loop}
    kept = {name: getattr(owner, name) for name, owner in owners.items()}
    sink, scheduler = bench.core.sink, bench.core._scheduler
    for name, call in kept.items():
        setattr(owners[name], name, timed(name, call))
    sink.append, sink.commit = timed("append", sink.append), timed("append", sink.commit)
    scheduler.schedule = timed("schedule", scheduler.schedule)
    try:
        yield
    finally:
        for name, call in kept.items():
            setattr(owners[name], name, call)
        del sink.append, sink.commit, scheduler.schedule


def _measure(bench: Bench, count: int, before: Callable[[int], None] = lambda number: None) -> dict:
    """Run 2 * `count` steps and return {phase: each step's time in ns}. Every second step is timed by phase.
    The other steps are timed as a whole ("whole"), because the phases' clocks cost time.
    """
    times: dict[str, list[int]] = defaultdict(list)
    for number in range(count):
        before(number)
        times["whole"].append(bench.step())
        before(number)
        _clock_phases(bench, times)
    return times


def _clock_phases(bench: Bench, times: dict[str, list[int]]) -> None:
    spent: dict[str, int] = defaultdict(int)
    with _phases(bench, spent):
        bench.step()
    for name in (*_CORE, "batch"):
        times[name].append(spent[name])
    times["core"].append(sum(spent[name] for name in _CORE))


def _running(shape: Shape, folder: Path, num_steps: int) -> Bench:
    """Return an engine with decoding rows. Unless `shape` is aligned, the rows have different positions in
    their KV blocks.
    """
    length = BLOCK * 4 + 2 * num_steps * (1 + shape.num_drafts) + 64
    blocks_each = -(-length // BLOCK) + 1
    bench = Bench(
        folder,
        max_num_seqs=shape.rows + bool(shape.prefill),
        token_budget=max(shape.rows * 33, 2048),
        max_model_len=max(length, 4096 if shape.prefill else 0),
        num_blocks=shape.rows * blocks_each + 1024,
        num_draft_tokens=shape.num_drafts,
        long_prefill_token_threshold=256 if shape.prefill else 0,
        max_in_flight=shape.max_in_flight,
        num_state_slots=2 * (shape.rows + 1) if shape.slots else 0,
    )
    for number in range(shape.rows):
        bench.ask(BLOCK if shape.aligned else BLOCK + number % BLOCK)
    while len(bench.core.state.running) < shape.rows:
        bench.step()
    for _ in range(8):
        bench.step()
    return bench


def decode(shape: Shape, folder: Path, count: int) -> dict[str, list[int]]:
    """Time decode steps. With `prefill`, these steps also prefill prompts with 2,048 tokens in chunks."""
    bench = _running(shape, folder, count)

    def refill(number: int) -> None:
        if shape.prefill and not bench.core.state.waiting and len(bench.core.state.running) <= shape.rows:
            bench.ask(2048, max_tokens=1)

    times = _measure(bench, count, refill)
    bench.close()
    return times


def boundary(rows: int, folder: Path, rounds: int) -> dict[str, dict[str, list[int]]]:
    """Time steps in which all rows fill a block, and steps in which all rows need a new block."""
    bench = _running(Shape(rows, aligned=True), folder, 32 * rounds + 32)
    times: dict[str, dict[str, list[int]]] = {"all rows fill a block": {}, "all rows need a block": {}}
    state = bench.core.state
    for name, place in (("all rows fill a block", BLOCK - 1), ("all rows need a block", 0)):
        found: dict[str, list[int]] = defaultdict(list)
        for number in range(2 * rounds):
            while int(state.num_computed[state.running[0]]) % BLOCK != place:
                bench.step()
            if number % 2:
                _clock_phases(bench, found)
            else:
                found["whole"].append(bench.step())
        times[name] = found
    bench.close()
    return times


def storm(rows: int, mode: str, folder: Path, count: int) -> dict[str, list[int]]:
    """Time steps with KV blocks for only half of the rows, so that requests are preempted all the time."""
    length = 256
    bench = Bench(
        folder,
        max_num_seqs=rows,
        token_budget=4096,
        max_model_len=length,
        num_blocks=rows * length // BLOCK // 2 + 1,
        preempt_mode=mode,
        swap_blocks=rows * length // BLOCK if mode == "swap" else 0,
    )

    def keep(number: int) -> None:
        missing = rows - len(bench.core.state.requests) - len(bench.core.inbox)
        for index in range(missing):
            bench.ask(32 + 16 * ((number + index) % 4), max_tokens=160)

    for number in range(100):
        keep(number)
        bench.step()
    times = _measure(bench, count, keep)
    if not bench.core.stats().num_preemptions:
        raise SystemExit("no request was preempted, so the figures are invalid")
    bench.close()
    return times


def steady(shape: Shape, folder: Path, count: int) -> tuple[int, float]:
    """Run `count` steps. Return the number of full garbage collections, and a checkpoint's time in µs."""
    bench, full = _running(shape, folder, count // 2), 0
    gc.collect()
    gc.freeze()

    def seen(phase: str, info: dict[str, int]) -> None:
        nonlocal full
        full += phase == "start" and info["generation"] == 2

    gc.callbacks.append(seen)
    for _ in range(count):
        for _output in bench.core.step():
            pass
    gc.callbacks.remove(seen)
    begin = time.thread_time_ns()
    for _ in range(5):
        bench.core.checkpoint()
    checkpoint_us = (time.thread_time_ns() - begin) / 5000
    bench.close()
    gc.unfreeze()
    return full, checkpoint_us


def memory(count: int, folder: Path) -> float:
    """Return the process's growth in MiB over the last nine tenths of `count` steps."""
    bench = Bench(
        folder, max_num_seqs=16, token_budget=512, max_model_len=512, num_blocks=400, max_media_per_request=0
    )
    before = 0.0
    for number in range(count):
        if number == count // 10:
            before = _resident_mib()
        missing = 20 - len(bench.core.state.requests) - len(bench.core.inbox)
        for _ in range(missing):
            bench.ask(20 + number % 100, max_tokens=30 + number % 70)
        for _output in bench.core.step():
            pass
    grown = _resident_mib() - before
    bench.close()
    return grown


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def trace(path: Path, folder: Path) -> str:
    """Run a trace's first 2,000 requests in 256 rows, and return a sentence with the engine's CPU time. All
    requests are submitted before the first step.
    """
    requests = read_servegen(path, 2000).requests
    longest = max(each.num_prompt + each.max_tokens for each in requests)
    bench = Bench(
        folder,
        max_num_seqs=256,
        token_budget=8192,
        max_model_len=longest,
        num_blocks=256 * 4096 // BLOCK,
        encoder_budget=2**17,
        encoder_cache_size=2**18,
        max_media_per_request=4096,
    )
    for each in requests:
        bench.core.submit(each.request())
    times = []
    while bench.core.has_work:
        times.append(bench.step())
    finished = bench.core.stats().num_finished
    bench.close()
    return (
        f"{finished:,} requests of {path.name} with 256 rows: {len(times):,} steps, {sum(times) / 1e9:.2f} s "
        f"in total, {sum(times) / len(times) / 1000:.0f} µs a step (p50 {percentile(times, 50) / 1000:.0f}, "
        f"p99 {percentile(times, 99) / 1000:.0f})"
    )
