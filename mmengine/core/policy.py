"""Policies: who goes first and who gives way, as pure functions of requests.

A policy is two functions. `rank` orders the waiting queue (smallest first); `victim` picks the
running request that loses its blocks when there are none left.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from mmengine.core.request_state import RequestState
from mmengine.errors import ConfigError


class Running(Protocol):
    """What a policy sees of the running batch: rows in admission order, and who holds them."""

    running: np.ndarray  # int32
    requests_by_row: list[RequestState | None]


class Policy(NamedTuple):
    rank: Callable[[RequestState], tuple[int, ...]]
    victim: Callable[[Running], int]


def _by_arrival(request: RequestState) -> tuple[int, ...]:
    return (request.arrival,)


def _last_admitted(view: Running) -> int:
    return int(view.running[-1])


def _by_priority(request: RequestState) -> tuple[int, ...]:
    return (request.request.priority, request.arrival)


def _least_important(view: Running) -> int:
    rows = view.running.tolist()
    return max(rows, key=lambda row: _by_priority(view.requests_by_row[row]))


_POLICIES = {
    "fcfs": Policy(_by_arrival, _last_admitted),
    "priority": Policy(_by_priority, _least_important),
}


def policy_named(name: str) -> Policy:
    """Raises ConfigError with the names that exist."""
    if name not in _POLICIES:
        raise ConfigError(f"no policy is called {name!r}; there are {', '.join(sorted(_POLICIES))}")
    return _POLICIES[name]
