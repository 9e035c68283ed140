"""Exports an engine's Prometheus metrics: the core's counters, and the requests' latencies.

Example:

    print(engine.metrics_text())                             # the text format, for any scraper
    prometheus_client.REGISTRY.register(engine.metrics)      # or beside a program's own metrics
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mmengine.core.outputs import Output, Outputs, Stats
from mmengine.core.state.draft_counts import DraftCounts
from mmengine.models.media_cache import MediaCache
from mmengine.processing.workers.decoders import Decoders
from mmengine.request import Request
from mmengine.serve.requests.health import Readiness
from mmengine.serve.requests.request_times import RequestTimes, Times

if TYPE_CHECKING:  # importing mmengine.build imports torch
    from mmengine.build import Built

REASONS = ("stop", "length", "repetition", "pooled", "abort", "error", "rejected")
COUNTERS = {  # field of Stats -> (metric name, help text)
    "steps": ("steps", "Steps that the executor ran."),
    "num_prompt_tokens": ("prompt_tokens", "Prompt tokens of accepted requests."),
    "num_output_tokens": ("output_tokens", "Tokens sampled."),
    "num_cached_tokens": (
        "cached_tokens",
        "Prompt tokens that were prefix cache hits when a request was admitted.",
    ),
    "num_looked_up_tokens": ("looked_up_tokens", "Tokens that were looked up in the prefix cache."),
    "num_scheduled_tokens": ("scheduled_tokens", "Tokens that steps computed."),
    "num_preemptions": ("preemptions", "Running requests that lost their blocks."),
    "num_encoded_items": ("encoded_items", "Images and videos that were encoded."),
    "num_fetched_blocks": ("fetched_blocks", "KV blocks that were loaded from a store."),
    "num_lost_fetches": ("lost_fetches", "Store reads that were late or incomplete."),
    "num_leases_taken": ("leases_taken", "Times that sessions released KV blocks for other requests."),
    "num_encoder_hits": ("encoder_hits", "Images and videos found in the encoder cache."),
    "log_bytes": ("log_bytes", "Bytes written to the event log."),
}
GAUGES = {
    "num_running": ("requests_running", "Requests that hold a row."),
    "num_waiting": ("requests_waiting", "Requests that wait for a row."),
    "kv_blocks_used": ("kv_blocks_used", "KV blocks that requests hold."),
    "kv_blocks_total": ("kv_blocks", "Number of KV blocks."),
    "kv_blocks_leased": ("kv_blocks_leased", "KV blocks that sessions keep between their requests."),
    "sessions_open": ("sessions_open", "Sessions that are open."),
}
STALLS = {"num_thrashes": "thrash", "num_no_progress": "no_progress"}
DRAFTS = {  # field of DraftCounts -> (metric name, help text)
    "runs": ("draft_runs", "Times that a drafter ran for a row in a step, by drafter."),
    "proposed": ("draft_tokens", "Draft tokens that were computed, by drafter."),
    "accepted": ("accepted_draft_tokens", "Draft tokens that were accepted, by drafter."),
}
GRAPHS = {"steps": "Steps", "chains": "Chains of drafts", "encodings": "Encodings of media"}
# Fields of Stats that `collect` exports with labels or in another unit.
ELSEWHERE = {"num_finished", "device_ns", "drafts", "overlap"}


class Metrics(Collector):
    """An engine's metrics. Other threads may read them; values change only between steps. `stats` returns the
    core's counters. `ready` returns whether the engine is ready for work. `drafters` returns each drafter's
    name and failure count. `graphs` returns counts for each key of GRAPHS: how often a CUDA graph was
    replayed, and for each reason how often no graph was replayed.
    """

    def __init__(
        self,
        stats: Callable[[], Stats],
        ready: Callable[[], bool],
        media: MediaCache | None = None,
        drafters: Callable[[], list[tuple[str, int]]] = list,
        graphs: Callable[[], dict[str, dict[str, int]]] = dict,
    ):
        self._stats, self.ready, self._media, self._drafters = stats, ready, media, drafters
        self._graphs = graphs
        # Returns (requests in preparation, the oldest request's age in s, a media-free prompt's longest wait
        # for a thread in s).
        self.preparing: Callable[[], tuple[int, float, float]] = lambda: (0, 0.0, 0.0)
        self.decoders_lost: Callable[[], int] = lambda: 0
        self._times, self._num_scheduled = RequestTimes(), 0
        self._ends = dict.fromkeys(REASONS, 0)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def submitted(self, request: Request, num_choices: int, prepared_s: float) -> None:
        self._times.submitted(request, num_choices, prepared_s)

    def saw_step(self, outputs: Outputs) -> list[Output]:
        """Record a step in the metrics and return the step's outputs."""
        scheduled = self._stats().num_scheduled_tokens
        taken = list(outputs)
        self._times.saw_step(taken, outputs.admitted, scheduled - self._num_scheduled)
        self._num_scheduled = scheduled
        for reason in [output.finish_reason for output in taken if output.finish_reason is not None]:
            self._ends[reason] += 1
        return taken

    def release(self, request_id: str) -> None:
        self._times.release(request_id)

    def tell_times(self, report: Callable[[str, Times], None]) -> None:
        """Have the engine's thread call `report(request_id, times)` when an answer ends."""
        self._times.report = report

    def text(self) -> str:
        """Return the metrics in Prometheus' text format, version 0.0.4."""
        return generate_latest(self._registry).decode()

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, (metric, help_text) in COUNTERS.items():
            yield CounterMetricFamily(f"mmengine_{metric}", help_text, value=getattr(stats, name))
        device_s = stats.device_ns / 1e9
        yield CounterMetricFamily(
            "mmengine_device_seconds", "Time for which the device computed steps.", value=device_s
        )
        for name, (metric, help_text) in GAUGES.items():
            yield GaugeMetricFamily(f"mmengine_{metric}", help_text, value=getattr(stats, name))
        num_preparing, oldest_s, _ = self.preparing()
        yield from _preparation_metrics(num_preparing, oldest_s, self.decoders_lost())
        ends = CounterMetricFamily(
            "mmengine_requests_finished", "Requests by how they ended.", labels=["reason"]
        )
        for reason, count in self._ends.items():
            ends.add_metric([reason], count)
        yield ends
        stalls = CounterMetricFamily(
            "mmengine_stalls", "Times that the engine made no progress, by kind.", labels=["kind"]
        )
        for name, kind in STALLS.items():
            stalls.add_metric([kind], getattr(stats, name))
        yield stalls
        yield from _draft_metrics(stats, self._drafters())
        for what, counts in self._graphs().items():
            help_text = f"{GRAPHS[what]} by whether a CUDA graph was replayed, or why not."
            yield _by_how(f"graph_{what}", help_text, counts)
        if stats.overlap:
            help_text = "Steps by whether they were decided while another step ran (ahead), or why not."
            yield _by_how("overlap_steps", help_text, stats.overlap)
        yield from _media_metrics(self._media)
        yield GaugeMetricFamily("mmengine_ready", "1 if the engine is ready for work.", value=self.ready())
        yield from self._times.collect()


def _draft_metrics(stats: Stats, drafters: list[tuple[str, int]]) -> Iterator[Metric]:
    for name, (metric, help_text) in DRAFTS.items():
        counter = CounterMetricFamily(f"mmengine_{metric}", help_text, labels=["drafter"])
        for number, (drafter, _) in enumerate(drafters):
            counter.add_metric([drafter], getattr(stats.drafts.get(number, DraftCounts()), name))
        yield counter
    failures = CounterMetricFamily(
        "mmengine_drafter_failures",
        "Times that a drafter raised an error or returned invalid drafts.",
        labels=["drafter"],
    )
    for drafter, count in drafters:
        failures.add_metric([drafter], count)
    yield failures


def _preparation_metrics(count: int, oldest_s: float, num_lost: int) -> Iterator[Metric]:
    help_text = "Requests whose prompts are being prepared or wait for preparation."
    yield GaugeMetricFamily("mmengine_requests_preparing", help_text, value=count)
    help_text = "Age of the oldest request in preparation."
    yield GaugeMetricFamily("mmengine_oldest_preparation_seconds", help_text, value=oldest_s)
    help_text = "Decoder processes that an image or a video ended."
    yield CounterMetricFamily("mmengine_decoders_lost", help_text, value=num_lost)


def _by_how(name: str, help_text: str, counts: dict[str, int]) -> Metric:
    counter = CounterMetricFamily(f"mmengine_{name}", help_text, labels=["how"])
    for how, count in counts.items():
        counter.add_metric([how], count)
    return counter


def _media_metrics(cache: MediaCache | None) -> Iterator[Metric]:
    cache = cache or MediaCache()  # without a media cache, all values are 0
    hits = "Images and videos that were found in the cache of prepared media."
    yield CounterMetricFamily("mmengine_media_cache_hits", hits, value=cache.hits)
    misses = "Images and videos that were decoded and resized."
    yield CounterMetricFamily("mmengine_media_cache_misses", misses, value=cache.misses)
    held = "Bytes of prepared images and videos in the cache."
    yield GaugeMetricFamily("mmengine_media_cache_bytes", held, value=cache.num_bytes)


def engine_metrics(
    built: "Built",
    readiness: Callable[[], Readiness],
    media: MediaCache[object] | None,
    decoders: Decoders | None,
) -> Metrics:
    """Return an engine's Metrics. The arguments are parts of the engine."""
    core, executor = built.core, built.executor
    metrics = Metrics(
        core.stats,
        lambda: readiness().ready,
        media,
        lambda: executor.drafters,
        lambda: executor.graph_counts,
    )
    if decoders is not None:
        metrics.decoders_lost = lambda: decoders.num_lost
    return metrics
