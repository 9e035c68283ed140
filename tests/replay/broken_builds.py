"""Plants bugs that make the engine log impossible decisions or crash, and writes logs with these bugs."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from mmengine.core.decide import running, start
from mmengine.core.engine import EngineCore
from mmengine.errors import MMEngineError
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogWriter
from mmengine.simulation.simulated_executor import SimulatedExecutor
from tests.core.small_engine import request, settings_of
from tests.log_copies import copied


def over_budget(within: Callable) -> Callable:
    """Give the running rows one token more than the budget."""
    return lambda wanted, budget: within(wanted, budget + 1)


def hits_twice(cached_prefix: Callable) -> Callable:
    """List the cached blocks twice, up to the maximum number for a prefix hit."""

    def doubled(view, req_state):
        cached = cached_prefix(view, req_state)
        return np.concatenate((cached, cached))[: (len(req_state.tokens) - 1) // view.block_size]

    return doubled


def crashing(within: Callable) -> Callable:
    """Raise IndexError if exactly three rows together want more tokens than the budget."""

    def crash(wanted, budget):
        if len(wanted) == 3 and int(wanted.sum()) > budget:
            raise IndexError(f"index {len(wanted)} is out of bounds")
        return within(wanted, budget)

    return crash


BUGS = {
    "over_budget": (running, "_within_budget", over_budget),
    "hits_twice": (start, "_cached_prefix", hits_twice),
    "crashing": (running, "_within_budget", crashing),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant a bug in this process while the `with` block runs."""
    module, function, bug = BUGS[name]
    whole = getattr(module, function)
    setattr(module, function, functools.wraps(whole)(bug(whole)))
    try:
        yield
    finally:
        setattr(module, function, whole)


def write_restarted(folder: Path, num_requests: int = 12) -> Path:
    """Serve requests with the bug `crashing` until the engine dies, then recover without the bug. Return the
    log's folder.
    """
    config = settings_of(token_budget=16, max_num_seqs=4, num_blocks=65, checkpoint_interval=16)
    sink = LogWriter(folder)
    core = EngineCore(config, SimulatedExecutor(config), sink=sink)
    with planted("crashing"), suppress(IndexError):
        for number in range(num_requests):
            core.submit(request(f"r{number}", 9 + 8 * (number % 5), max_tokens=2 + number % 5))
        while core.has_work:
            core.step()
    core = EngineCore(config, SimulatedExecutor(config), sink=sink, state=core.state)
    core.recover(ev.Recovered(steps=(core.state.step,)))
    while core.has_work:
        core.step()
    core.close()
    return folder


def write_broken(folder: Path, name: str, num_requests: int = 24) -> Path:
    """Serve requests with a planted bug, and return the log's folder. If the engine dies, the log is not
    closed.

    Each group with three requests shares a prefix, so that prefix cache hits occur.
    """
    config = settings_of(token_budget=16, max_num_seqs=4, num_blocks=65, checkpoint_interval=16)
    alive = folder.with_name(f"{folder.name}-alive")
    sink = LogWriter(alive, reserve_bytes=0)
    core = EngineCore(config, SimulatedExecutor(config), sink=sink)
    with planted(name):
        try:
            for number in range(num_requests):
                prompt = [1 + (number // 3 * 7 + place) % 50 for place in range(9 + 8 * (number % 5))]
                core.submit(request(f"r{number}", prompt, max_tokens=2 + number % 5))
                if number % 2:
                    core.step()
            while core.has_work:
                core.step()
        except MMEngineError:
            raise
        except Exception:
            sink.commit()
            return copied(alive, folder)
    core.close()
    return copied(alive, folder)
