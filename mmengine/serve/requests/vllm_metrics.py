"""Exports the metrics under vLLM's names, for dashboards and autoscalers that expect these names."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

ENGINE = "0"  # the label `engine`; this server has a single engine
SAME = {  # our name without "mmengine_" -> vLLM's name without "vllm:"
    "requests_running": "num_requests_running",
    "requests_waiting": "num_requests_waiting",
    "preemptions": "num_preemptions",
    "prompt_tokens": "prompt_tokens",
    "output_tokens": "generation_tokens",
    "looked_up_tokens": "prefix_cache_queries",
    "media_cache_hits": "mm_cache_hits",
    "step_tokens": "iteration_tokens_total",
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_seconds": "inter_token_latency_seconds",
    "time_per_output_token_seconds": "request_time_per_output_token_seconds",
    "request_seconds": "e2e_request_latency_seconds",
    "request_queue_seconds": "request_queue_time_seconds",
    "request_prefill_seconds": "request_prefill_time_seconds",
    "request_decode_seconds": "request_decode_time_seconds",
    "request_inference_seconds": "request_inference_time_seconds",
    "request_prompt_tokens": "request_prompt_tokens",
    "request_output_tokens": "request_generation_tokens",
    "request_max_tokens": "request_params_max_tokens",
    "request_choices": "request_params_n",
}
SUMS = {  # as SAME, but summed over labels that vLLM's metrics do not have
    "draft_runs": "spec_decode_num_drafts",
    "draft_tokens": "spec_decode_num_draft_tokens",
    "accepted_draft_tokens": "spec_decode_num_accepted_tokens",
    "cached_tokens": "prefix_cache_hits",
    "refusals": "admission_rejections",
}
TWICE = {  # further vLLM names for metrics that are already in the tables above
    "cached_tokens": "prompt_tokens_cached",
    "time_per_output_token_seconds": "time_per_output_token_seconds",
    "request_output_tokens": "request_max_num_generation_tokens",
}
REASONS = ("stop", "length", "repetition", "abort", "error")


class VllmMetrics(Collector):
    """Renames the metrics that `ours` yields. `config` has the labels for the metric cache_config_info."""

    def __init__(
        self, ours: Callable[[], Iterator[Metric]], model_name: str, config: Mapping[str, object]
    ) -> None:
        self._ours, self._config = ours, config
        self._labels = {"model_name": model_name, "engine": ENGINE}

    def collect(self) -> Iterator[Metric]:
        found = {each.name.removeprefix("mmengine_"): each for each in self._ours()}
        for names in (SAME, TWICE):
            for ours, theirs in names.items():
                if ours in found:
                    yield self._renamed(found[ours], theirs)
        for ours, theirs in SUMS.items():
            if ours in found:
                yield self._counter(theirs, found[ours].documentation, _sum(found[ours]))
        yield from self._computed(found)

    def _renamed(self, family: Metric, name: str) -> Metric:
        name, before = f"vllm:{name}", len(family.name)
        renamed = Metric(name, family.documentation, family.type)
        renamed.samples = [
            Sample(name + each.name[before:], {**self._labels, **each.labels}, each.value)
            for each in family.samples
        ]
        return renamed

    def _counter(self, name: str, help_text: str, value: float) -> Metric:
        counter = CounterMetricFamily(f"vllm:{name}", help_text, labels=list(self._labels))
        counter.add_metric(list(self._labels.values()), value)
        return counter

    def _gauge(self, name: str, help_text: str, value: float, **labels: str) -> Metric:
        labels = {**self._labels, **labels}
        gauge = GaugeMetricFamily(f"vllm:{name}", help_text, labels=list(labels))
        gauge.add_metric(list(labels.values()), value)
        return gauge

    def _computed(self, found: Mapping[str, Metric]) -> Iterator[Metric]:
        used = _sum(found["kv_blocks_used"]) / max(1.0, _sum(found["kv_blocks"]))
        yield self._gauge("kv_cache_usage_perc", "Share of the KV blocks that requests hold.", used)
        looked_up = _sum(found["media_cache_hits"]) + _sum(found["media_cache_misses"])
        yield self._counter("mm_cache_queries", "Images and videos that were looked up.", looked_up)
        by_reason = {each.labels["reason"]: each.value for each in found["requests_finished"].samples}
        success = CounterMetricFamily(
            "vllm:request_success", "Requests by how they ended.", labels=[*self._labels, "finished_reason"]
        )
        for reason in REASONS:
            success.add_metric([*self._labels.values(), reason], by_reason[reason])
        yield success
        waiting = {"capacity": _sum(found["requests_waiting"]), "deferred": 0.0}
        by_why = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Requests that wait for a row.",
            labels=[*self._labels, "reason"],
        )
        for why, count in waiting.items():
            by_why.add_metric([*self._labels.values(), why], count)
        yield by_why
        yield self._gauge(
            "cache_config_info",
            "Settings of the KV cache.",
            1.0,
            **{name: str(value) for name, value in self._config.items()},
        )


def _sum(family: Metric) -> float:
    return sum(each.value for each in family.samples)
