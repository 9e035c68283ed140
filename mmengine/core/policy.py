"""Policies: who goes first and who gives way, as pure functions of requests.

A policy is two functions. `rank` orders the waiting queue (smallest first); `victim` picks the
running request that loses its blocks when there are none left.
"""

from typing import TYPE_CHECKING, NamedTuple, Protocol

from mmengine.errors import ConfigError

if TYPE_CHECKING:
    from mmengine.core.state import RequestState, View


class Rank(Protocol):
    def __call__(self, request: "RequestState") -> tuple[int, ...]: ...


class Victim(Protocol):
    def __call__(self, view: "View") -> int: ...


class Policy(NamedTuple):
    rank: Rank
    victim: Victim


def _by_arrival(request: "RequestState") -> tuple[int, ...]:
    return (request.arrival,)


def _last_admitted(view: "View") -> int:
    return int(view.running[-1])


def _by_priority(request: "RequestState") -> tuple[int, ...]:
    return (request.request.priority, request.arrival)


def _least_important(view: "View") -> int:
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
