"""Scheduling policies: they order waiting requests and select the running request that is preempted.

A policy has two pure functions. `rank` orders the waiting queue, smallest first. `victim`
selects the running request that loses its blocks when no block is free.
"""

from collections.abc import Callable
from typing import NamedTuple

from mmengine.config import EngineConfig
from mmengine.core.state.read_only import RequestView, RunningView
from mmengine.core.state.request_state import RequestState
from mmengine.registry import Registry


class Policy(NamedTuple):
    """A scheduling policy.

    `prefill_first`: decoding rows wait while prompts can be computed.
    `num_ahead`: the first `num_ahead` values in a rank, for example the priority, take precedence over the
    tenants' order (core/state/tenants.py).
    """

    rank: Callable[[RequestState | RequestView], tuple[int, ...]]
    victim: Callable[[RunningView], int]
    prefill_first: bool = False
    num_ahead: int = 0


def _by_arrival(request: RequestState | RequestView) -> tuple[int, ...]:
    return (request.arrival,)


def _last_admitted(view: RunningView) -> int:
    return int(view.running[-1])


def _by_priority(request: RequestState | RequestView) -> tuple[int, ...]:
    return (request.request.priority, request.arrival)


def _least_important(view: RunningView) -> int:
    rows: list[int] = view.running.tolist()
    return max(rows, key=lambda row: _by_priority(view.requests_by_row[row]))


FCFS = Policy(_by_arrival, _last_admitted)
PRIORITY = Policy(_by_priority, _least_important, num_ahead=1)
PREFILL_FIRST = Policy(_by_arrival, _last_admitted, prefill_first=True)

POLICIES: Registry[Policy] = Registry(
    "mmengine.policies",
    "policy",
    own={
        "fcfs": f"{__name__}:FCFS",
        "prefill_first": f"{__name__}:PREFILL_FIRST",
        "priority": f"{__name__}:PRIORITY",
    },
    kind="Policy",
    is_one=lambda found: isinstance(found, Policy),
    unknown="no policy is called {name!r}; there are {known}",
)
# Registers a policy in this process. An installed package uses an entry point instead. Raises ConfigError if
# the name is already used.
register_policy = POLICIES.register
# Returns the policy with the given name. Raises ConfigError, with the known names, for an unknown name.
policy_named = POLICIES.load


def _preempted_first(request: RequestState | RequestView) -> tuple[int, ...]:
    return (-request.preempted, request.arrival)


# vLLM puts a preempted request at the front of its queue, so the most recently preempted request comes first.
_VLLM_FCFS = Policy(_preempted_first, _last_admitted)


def policy_of(config: EngineConfig) -> Policy:
    """Return the policy that the settings select. Raises ConfigError as `policy_named` does."""
    vllm_fcfs = config.compat != "" and config.policy == "fcfs"
    return _VLLM_FCFS if vllm_fcfs else policy_named(config.policy)
