"""What the HTTP layer counts, beside the engine's own metrics."""

import time
from collections import deque

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 60, 300)
_LAG_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1)
_ENDS = 64  # answers that the drain rate is measured over
_MOST_RETRY_S = 60


class HttpMetrics:
    """`retry_after_s` follows from how fast answers end."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry(auto_describe=False)
        self.requests = Counter(
            "mmengine_http_requests", "Requests by route and status.", ["route", "code"], registry=registry
        )
        self.seconds = Histogram(
            "mmengine_http_request_seconds",
            "From a request's head to the end of its answer.",
            ["route"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.body_bytes = Counter("mmengine_http_body_bytes", "Bytes of bodies that came.", registry=registry)
        self.streams = Gauge("mmengine_http_streams_open", "Streams that are open.", registry=registry)
        self.ends = Counter("mmengine_http_streams", "Streams by how they ended.", ["how"], registry=registry)
        self.lag = Histogram(
            "mmengine_event_loop_lag_seconds",
            "How late the event loop wakes.",
            buckets=_LAG_SECONDS,
            registry=registry,
        )
        self._finished: deque[float] = deque(maxlen=_ENDS)

    def answered(self) -> None:
        self._finished.append(time.monotonic())

    @property
    def retry_after_s(self) -> int:
        """When one more is likely to be taken: the time between two answers, 1 to 60 s."""
        if len(self._finished) < 2:
            return 1
        mean = (self._finished[-1] - self._finished[0]) / (len(self._finished) - 1)
        return max(1, min(_MOST_RETRY_S, round(mean)))

    def text(self) -> str:
        return generate_latest(self._registry).decode()
