"""Policies: who goes first and who gives way, as pure functions of requests.

A policy is two functions. `rank` orders the waiting queue (smallest first); `victim` picks the
running request that loses its blocks when there are none left.
"""

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import NamedTuple, Protocol

from mmengine.config import EngineConfig
from mmengine.core.state.columns import ReadOnlyArray
from mmengine.core.state.reading import RequestsByRow, RequestView
from mmengine.errors import ConfigError

GROUP = "mmengine.policies"


class Running(Protocol):
    """What a policy sees of the running batch: rows in admission order, and who holds them."""

    @property
    def running(self) -> ReadOnlyArray: ...  # intp
    @property
    def requests_by_row(self) -> RequestsByRow: ...


class Policy(NamedTuple):
    """`prefill_first`: steps that compute prompts let those wait that decode."""

    rank: Callable[[RequestView], tuple[int, ...]]
    victim: Callable[[Running], int]
    prefill_first: bool = False


def _by_arrival(request: RequestView) -> tuple[int, ...]:
    return (request.arrival,)


def _last_admitted(view: Running) -> int:
    return int(view.running[-1])


def _by_priority(request: RequestView) -> tuple[int, ...]:
    return (request.request.priority, request.arrival)


def _least_important(view: Running) -> int:
    rows: list[int] = view.running.tolist()
    return max(rows, key=lambda row: _by_priority(view.requests_by_row[row]))


_POLICIES = {
    "fcfs": Policy(_by_arrival, _last_admitted),
    "priority": Policy(_by_priority, _least_important),
    "prefill_first": Policy(_by_arrival, _last_admitted, prefill_first=True),
}


def _preempted_first(request: RequestView) -> tuple[int, ...]:
    return (-request.preempted, request.arrival)


# vLLM puts who gave way at the very front of its queue, the last of them first.
_VLLM_FCFS = Policy(_preempted_first, _last_admitted)


def policy_of(config: EngineConfig) -> Policy:
    """The policy that the settings ask for. Raises ConfigError like `policy_named`."""
    vllm_fcfs = config.compat == "vllm" and config.policy == "fcfs"
    return _VLLM_FCFS if vllm_fcfs else policy_named(config.policy)


def register_policy(name: str, policy: Policy) -> None:
    """Make a policy known by name in this process; an installed package uses an entry point instead.

    Raises ConfigError for a name that is taken.
    """
    if _POLICIES.get(name, policy) is not policy:
        raise ConfigError(f"a policy is called {name!r} already; choose another name")
    _POLICIES[name] = policy


def policy_named(name: str) -> Policy:
    """A policy of this engine, a registered one, or an entry point of the group `mmengine.policies`.

    Raises ConfigError with the names that exist.
    """
    if name in _POLICIES:
        return _POLICIES[name]
    points = {point.name: point for point in entry_points(group=GROUP)}
    if name not in points:
        req_state = ", ".join(sorted({*_POLICIES, *points}))
        raise ConfigError(f"no policy is called {name!r}; there are {req_state}")
    policy = points[name].load()
    if not isinstance(policy, Policy):
        raise ConfigError(f"the entry point {points[name].value} is no Policy")
    return policy
