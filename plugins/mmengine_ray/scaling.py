"""Scales the number of replicas by the waiting prompt tokens, which determine the queueing time."""

import math
from collections.abc import Mapping

WAITING = "waiting_tokens"  # name of the statistic that each replica reports
Policy = tuple[int, dict[str, object]]


def wanted_replicas(
    waiting_tokens: float, num_requests: float, current: int, each_tokens: int, each_open: int
) -> int:
    """Return how many replicas to run.

    Adds replicas if more than `each_tokens` tokens per replica wait. Removes a replica if no tokens wait and
    the other replicas would then be at most half full. `each_open`: maximum number of requests per replica.
    """
    needed = math.ceil(waiting_tokens / each_tokens)
    if needed > current:
        return needed
    if not waiting_tokens and current > 1 and num_requests <= (current - 1) * each_open / 2:
        return current - 1
    return current


class ByWaitingTokens:
    """A policy for the autoscaling of Serve."""

    def __init__(self, waiting_tokens: int, max_open: int):
        self._waiting_tokens, self._max_open = waiting_tokens, max_open

    def __call__(self, context: "Context") -> Policy:
        metrics = context.aggregated_metrics or {}
        waiting = sum(metrics.get(WAITING, {}).values())
        current = context.target_num_replicas
        wanted = wanted_replicas(
            waiting, context.total_num_requests, current, self._waiting_tokens, self._max_open
        )
        config = context.config
        return max(config.min_replicas, min(wanted, config.max_replicas)), {}


class Bounds:
    """The fields of Serve's AutoscalingConfig that the policy reads."""

    min_replicas: int
    max_replicas: int


class Context:
    """The fields of Serve's AutoscalingContext that the policy reads."""

    aggregated_metrics: Mapping[str, Mapping[object, float]] | None
    total_num_requests: float
    target_num_replicas: int
    config: Bounds
