"""Helpers that run and check engines with windows, for test_block_groups.py and test_uniform_window.py.

`change`: a function of (config, seed) that returns the config with windows, or None if this config does not
support windows.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from mmengine.config import EngineConfig
from mmengine.core.engine import EngineCore
from mmengine.core.fold.evolve import evolve
from mmengine.core.snapshot import snapshot
from mmengine.core.state.digest import state_digest
from mmengine.core.state.state import State
from mmengine.events import vocabulary as ev
from mmengine.events.codec import as_logged
from mmengine.events.log import LogReader
from mmengine.request import Request
from mmengine.simulation.simulated_executor import SimulatedExecutor
from tests.core.chaos import Chaos, check_seed
from tests.core.small_engine import Bench
from tests.core.workloads import Watched, small_config, small_request

Change = Callable[[EngineConfig, int], EngineConfig | None]
Patch = tuple[object, str, object]  # Arguments of monkeypatch.setattr.


def seeds_with(change: Change, count: int) -> list[int]:
    """Return the first `count` seeds whose settings support windows."""
    found = (seed for seed in range(10_000) if change(small_config(random.Random(seed)), seed))
    return [next(found) for _ in range(count)]


def check_windows(seed: int, folder: Path, change: Change) -> None:
    check_seed(seed, folder, change=lambda config: change(config, seed))


def check_planted(
    patches: tuple[Patch, ...],
    seeds: list[int],
    change: Change,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check that a run of one of the seeds fails with the planted bug."""
    for patch in patches:
        monkeypatch.setattr(*patch)
    with pytest.raises((AssertionError, KeyError, ValueError)):
        for seed in seeds:
            check_windows(seed, folder / str(seed), change)


def run_chaos(seed: int, folder: Path, change: Change) -> tuple[EngineConfig, list[ev.Event]]:
    """Run and check a seed, and return its settings and events."""
    chaos = Chaos(seed, folder, change=lambda config: change(config, seed))
    chaos.run()
    chaos.check()
    return chaos.config, [record.event for record in LogReader(folder)]


def restored_states(config: EngineConfig, events: list[ev.Event]) -> Iterator[tuple[State, State]]:
    """Apply the events. Check a snapshot after every seventh event, and yield the state and its restored
    copy.
    """
    state = State(config)
    for sequence, event in enumerate(events):
        evolve(state, event)
        if sequence % 7:
            continue
        data = snapshot.take(state, events[0], sequence)
        restored, body = snapshot.restore(data)
        assert body.started == as_logged(events[0])
        assert state_digest(restored) == state_digest(state)
        assert snapshot.take(restored, events[0], sequence) == data
        yield state, restored


def random_states(seed: int, change: Change) -> Iterator[tuple[EngineConfig, State]]:
    """Run six random requests, and yield the settings and the state after each step."""
    rng = random.Random(seed)
    config = msgspec.structs.replace(change(small_config(rng), seed), max_waiting=8)
    executor = Watched(SimulatedExecutor(config, check_kv=True))
    core = EngineCore(config, executor)
    executor.state = core.state
    for number in range(6):
        core.submit(small_request(rng, f"r{number}", config))
    while core.has_work:
        core.step()
        yield config, core.state


def held(bench: Bench) -> int:
    """Return the number of blocks in use."""
    return bench.state.blocks.num_blocks - 1 - bench.state.blocks.num_free


def most_held(bench: Bench, request: Request) -> int:
    """Run the request, and return the maximum number of blocks in use after a step."""
    bench.submit(request)
    most = 0
    while bench.core.has_work:
        bench.step()
        most = max(most, held(bench))
    return most


def admitted_of(bench: Bench, request: Request) -> ev.Admitted:
    """Run the request, and return its only event ADMITTED."""
    bench.submit(request)
    (admitted,) = [event for event in bench.run() if isinstance(event, ev.Admitted)]
    return admitted
