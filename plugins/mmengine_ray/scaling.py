"""How many replicas there should be: by the tokens of prompts that wait, which say how long a call waits."""

import math
from collections.abc import Mapping

WAITING = "waiting_tokens"  # by which a replica tells of them
Policy = tuple[int, dict[str, object]]


def wanted_replicas(
    waiting_tokens: float, num_requests: float, current: int, each_tokens: int, each_open: int
) -> int:
    """More than `current` where that many tokens are too many to wait; one fewer where nothing waits and the
    others have room for the requests that run; else as many as there are."""
    needed = math.ceil(waiting_tokens / each_tokens)
    if needed > current:
        return needed
    if not waiting_tokens and current > 1 and num_requests <= (current - 1) * each_open / 2:
        return current - 1
    return current


class ByWaitingTokens:
    """A policy of Serve's autoscaling."""

    def __init__(self, waiting_tokens: int, max_open: int):
        self._waiting_tokens, self._max_open = waiting_tokens, max_open

    def __call__(self, context: "Context") -> Policy:
        told = context.aggregated_metrics or {}
        waiting = sum(told.get(WAITING, {}).values())
        current = context.target_num_replicas
        wanted = wanted_replicas(
            waiting, context.total_num_requests, current, self._waiting_tokens, self._max_open
        )
        config = context.config
        return max(config.min_replicas, min(wanted, config.max_replicas)), {}


class Bounds:
    """Of Serve's AutoscalingConfig what is read here."""

    min_replicas: int
    max_replicas: int


class Context:
    """Of Serve's AutoscalingContext what is read here."""

    aggregated_metrics: Mapping[str, Mapping[object, float]] | None
    total_num_requests: float
    target_num_replicas: int
    config: Bounds
