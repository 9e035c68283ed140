"""The HTTP server's Prometheus metrics. The engine has its own metrics."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from mmengine.server.http.errors import ApiError

SECONDS = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 60, 300)
LAG_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1)
# Codes of the errors that are counted as refusals.
REFUSALS = ("queue_full", "bodies_full", "key_share_full", "not_ready", "shutting_down")
OUTCOMES = ("completed", "failed")  # Outcomes of batch lines. OpenAI's request_counts has the same names.
ENDS = ("whole", "error", "left", "slow reader", "shutdown")


class HttpMetrics:
    """Counters, gauges and histograms for requests, streams, errors and batches."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry(auto_describe=False)
        self.requests = Counter(
            "mmengine_http_requests",
            "Requests by route and status.",
            ["route", "method", "code"],
            registry=registry,
        )
        self.seconds = Histogram(
            "mmengine_http_request_seconds",
            "Seconds from a request's head to the end of its answer.",
            ["route", "method"],
            buckets=SECONDS,
            registry=registry,
        )
        self.body_bytes = Counter(
            "mmengine_http_body_bytes", "Bytes of request bodies received.", registry=registry
        )
        self.streams = Gauge("mmengine_http_streams_open", "Open streams.", registry=registry)
        self._num_frames = 0
        registry.register(FunctionCollector(self._frames))
        self.ends = Counter("mmengine_http_streams", "Ended streams by reason.", ["how"], registry=registry)
        self.left = Counter(
            "mmengine_http_clients_left",
            "Clients that disconnected before their answer was complete.",
            registry=registry,
        )
        self.errors = Counter(
            "mmengine_http_errors",
            "Errors sent to clients, including errors in streams.",
            ["type", "code"],
            registry=registry,
        )
        self.refusals = Counter(
            "mmengine_refusals",
            "Refused calls that may be retried later, by reason.",
            ["reason"],
            registry=registry,
        )
        self.lag = Histogram(
            "mmengine_event_loop_lag_seconds",
            "Seconds by which the event loop wakes up late.",
            buckets=LAG_SECONDS,
            registry=registry,
        )
        self.batches = Gauge("mmengine_batches_live", "Batches in progress.", registry=registry)
        self.batch_lines = Counter(
            "mmengine_batch_lines", "Answered batch lines by outcome.", ["outcome"], registry=registry
        )
        self.kept_bytes = Gauge(
            "mmengine_kept_bytes", "Bytes stored beside the log.", ["what"], registry=registry
        )
        for outcome in OUTCOMES:
            self.batch_lines.labels(outcome)
        # Create the series at startup, so that Prometheus sees the increase from 0 to 1.
        for reason in REFUSALS:
            self.refusals.labels(reason)
        for how in ENDS:
            self.ends.labels(how)

    def line_answered(self, is_good: bool) -> None:
        """Count a batch line. `is_good`: whether the line has an answer rather than an error."""
        self.batch_lines.labels(OUTCOMES[not is_good]).inc()

    def count_error(self, error: ApiError) -> None:
        """Count an error that was sent to a client."""
        code = error.body.code or str(error.status)
        self.errors.labels(error.body.type, code).inc()
        if code in REFUSALS:
            self.refusals.labels(code).inc()

    def count_events(self, num_frames: int) -> None:
        """Count events that were sent in streams. Must run on the event loop, so that no lock is needed."""
        self._num_frames += num_frames

    def _frames(self) -> Iterator[Metric]:
        yield CounterMetricFamily("mmengine_http_frames", "Events sent in streams.", self._num_frames)

    def stream_ended(self, how: str) -> None:
        self.streams.dec()
        self.ends.labels(how).inc()
        if how == "left":
            self.left.inc()

    def collect(self) -> Iterator[Metric]:
        yield from self._registry.collect()


class FunctionCollector(Collector):
    """A collector for the metrics that a function yields."""

    def __init__(self, families: Callable[[], Iterator[Metric]]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return self._families()


def vllm_http_families(families: Iterator[Metric]) -> Iterator[Metric]:
    """Yield the request counts and durations in `families` under vLLM's names."""
    for family in families:
        if family.name == "mmengine_http_requests":
            counter = CounterMetricFamily(
                "http_requests", family.documentation, labels=["handler", "method", "status"]
            )
            by_class: dict[tuple[str, str, str], float] = {}
            for each in family.samples:
                if each.name.endswith("_total"):
                    key = each.labels["route"], each.labels["method"], f"{each.labels['code'][0]}xx"
                    by_class[key] = by_class.get(key, 0.0) + each.value
            for key, value in by_class.items():
                counter.add_metric(list(key), value)
            yield counter
        elif family.name == "mmengine_http_request_seconds":
            histogram = HistogramMetricFamily("http_request_duration_seconds", family.documentation)
            for each in family.samples:
                rest = {name: value for name, value in each.labels.items() if name != "route"}
                if not each.name.endswith("_created"):
                    suffix = each.name.removeprefix(family.name)
                    histogram.add_sample(
                        histogram.name + suffix, {"handler": each.labels["route"], **rest}, each.value
                    )
            yield histogram
