"""The Prometheus metrics of an ingress, the server in front of several replicas."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Metric


class FleetMetrics:
    """Counts moved requests, tokens and open requests. Replicas have their own metrics."""

    def __init__(self, num_open: Callable[[], int]) -> None:
        self._registry = registry = CollectorRegistry(auto_describe=False)
        self.moves = Counter(
            "mmengine_fleet_moves", "Requests that moved to another replica.", registry=registry
        )
        self.num_tokens = 0  # tokens of answers that have ended
        self._tokens = Counter("mmengine_fleet_tokens", "Tokens of answers that ended.", registry=registry)
        Gauge("mmengine_fleet_open", "Requests that are open.", registry=registry).set_function(num_open)

    def ended(self, num_tokens: int) -> None:
        """Count an answer that ended, and the number of tokens that were forwarded for it."""
        self.num_tokens += num_tokens
        self._tokens.inc(num_tokens)

    def collect(self) -> Iterator[Metric]:
        yield from self._registry.collect()
