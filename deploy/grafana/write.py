"""Write the dashboards next to this file: `python deploy/grafana/write.py`.

mmengine.json queries mmengine's metric names. mmengine-vllm-names.json queries vLLM's names, which a server
also exports with --metrics-compat vllm. The second dashboard can show mmengine and vLLM side by side.
"""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
RATE = "[$__rate_interval]"
QUANTILES = (0.5, 0.9, 0.99)
WIDTH, HEIGHT, PER_ROW = 8, 8, 3  # a panel's size in Grafana's grid of 24 columns


class Query(NamedTuple):
    expr: str
    legend: str


class Panel(NamedTuple):
    title: str
    unit: str
    queries: tuple[Query, ...]


class Names(NamedTuple):
    """The metric names of one naming scheme. `own`: labels in every selector."""

    running: str
    waiting: str
    kv_usage: str
    preemptions: str
    prompt_tokens: str
    output_tokens: str
    cached: str
    looked_up: str
    media_hits: str
    media_lookups: str
    finished: str
    reason: str
    first_token: str
    between: str
    whole: str
    queue: str
    prefill: str
    decode: str
    prompt: str
    output: str
    step: str
    drafts: str
    accepted: str
    own: str


OWN = 'job=~"$job", instance=~"$instance"'
OURS = Names(
    running="mmengine_requests_running",
    waiting="mmengine_requests_waiting",
    kv_usage="sum(mmengine_kv_blocks_used{%s}) / sum(mmengine_kv_blocks{%s})",
    preemptions="mmengine_preemptions_total",
    prompt_tokens="mmengine_prompt_tokens_total",
    output_tokens="mmengine_output_tokens_total",
    cached="mmengine_cached_tokens_total",
    looked_up="mmengine_looked_up_tokens_total",
    media_hits="mmengine_media_cache_hits_total",
    media_lookups="(sum(rate(mmengine_media_cache_hits_total{%s}%s)) "
    "+ sum(rate(mmengine_media_cache_misses_total{%s}%s)))",
    finished="mmengine_requests_finished_total",
    reason="reason",
    first_token="mmengine_time_to_first_token_seconds",
    between="mmengine_inter_token_seconds",
    whole="mmengine_request_seconds",
    queue="mmengine_request_queue_seconds",
    prefill="mmengine_request_prefill_seconds",
    decode="mmengine_request_decode_seconds",
    prompt="mmengine_request_prompt_tokens",
    output="mmengine_request_output_tokens",
    step="mmengine_step_tokens",
    drafts="mmengine_draft_tokens_total",
    accepted="mmengine_accepted_draft_tokens_total",
    own=OWN,
)
VLLM = Names(
    running="vllm:num_requests_running",
    waiting="vllm:num_requests_waiting",
    kv_usage="avg(vllm:kv_cache_usage_perc{%s})",
    preemptions="vllm:num_preemptions_total",
    prompt_tokens="vllm:prompt_tokens_total",
    output_tokens="vllm:generation_tokens_total",
    cached="vllm:prefix_cache_hits_total",
    looked_up="vllm:prefix_cache_queries_total",
    media_hits="vllm:mm_cache_hits_total",
    media_lookups="sum(rate(vllm:mm_cache_queries_total{%s}%s))",
    finished="vllm:request_success_total",
    reason="finished_reason",
    first_token="vllm:time_to_first_token_seconds",
    between="vllm:inter_token_latency_seconds",
    whole="vllm:e2e_request_latency_seconds",
    queue="vllm:request_queue_time_seconds",
    prefill="vllm:request_prefill_time_seconds",
    decode="vllm:request_decode_time_seconds",
    prompt="vllm:request_prompt_tokens",
    output="vllm:request_generation_tokens",
    step="vllm:iteration_tokens_total",
    drafts="vllm:spec_decode_num_draft_tokens_total",
    accepted="vllm:spec_decode_num_accepted_tokens_total",
    own=OWN + ', model_name=~"$model_name"',
)


def rate_of(own: str, name: str, by: str = "") -> str:
    return f"sum{f' by ({by}) ' if by else ''}(rate({name}{{{own}}}{RATE}))"


def engine_panels(names: Names) -> Iterator[Panel]:
    own = names.own

    rate = partial(rate_of, own)

    def share(part: str, whole: str) -> str:
        return f"{part} / ({whole} > 0)"

    def times(title: str, name: str, unit: str = "s") -> Panel:
        return Panel(title, unit, tuple(quantiles(name, own)))

    yield Panel(
        "Running and waiting requests",
        "short",
        (
            Query(f"sum({names.running}{{{own}}})", "run"),
            Query(f"sum({names.waiting}{{{own}}})", "wait"),
        ),
    )
    yield Panel(
        "Tokens per second",
        "short",
        (Query(rate(names.prompt_tokens), "of prompts"), Query(rate(names.output_tokens), "of answers")),
    )
    yield Panel(
        "Finished requests per second",
        "reqps",
        (Query(rate(names.finished, names.reason), f"{{{{{names.reason}}}}}"),),
    )
    yield times("Time to first token", names.first_token)
    yield times("Time between tokens", names.between)
    yield times("Time per answer", names.whole)
    yield Panel(
        "Mean time by phase",
        "s",
        tuple(
            Query(share(rate(f"{name}_sum"), rate(f"{name}_count")), legend)
            for name, legend in (
                (names.queue, "queue"),
                (names.prefill, "first step to first token"),
                (names.decode, "decode"),
            )
        ),
    )
    filled = names.kv_usage % ((own,) * names.kv_usage.count("%s"))
    yield Panel("KV blocks in use", "percentunit", (Query(filled, "in use"),))
    media = names.media_lookups % ((own, RATE) * (names.media_lookups.count("%s") // 2))
    yield Panel(
        "Cache hit rates",
        "percentunit",
        (
            Query(share(rate(names.cached), rate(names.looked_up)), "prompt tokens"),
            Query(share(rate(names.media_hits), media), "images and videos"),
        ),
    )
    yield times("Prompt tokens", names.prompt, "short")
    yield times("Answer tokens", names.output, "short")
    yield times("Tokens per step", names.step, "short")
    yield Panel("Preemptions per second", "short", (Query(rate(names.preemptions), "preemptions"),))
    yield Panel(
        "Accepted drafts",
        "percentunit",
        (Query(share(rate(names.accepted), rate(names.drafts)), "kept"),),
    )


def quantiles(name: str, own: str, by: str = "le") -> Iterator[Query]:
    for quantile in QUANTILES:
        inner = f"sum by ({by}) (rate({name}_bucket{{{own}}}{RATE}))"
        yield Query(f"histogram_quantile({quantile}, {inner})", f"p{quantile * 100:.0f}")


def http_panels() -> Iterator[Panel]:
    """Yield the panels for metrics without vLLM names."""

    def rate(name: str, by: str = "") -> str:
        return rate_of(OWN, f"mmengine_{name}", by)

    yield Panel(
        "HTTP requests per second, by status",
        "reqps",
        (Query(rate("http_requests_total", "code"), "{{code}}"),),
    )
    yield Panel(
        "Rejected calls per second",
        "reqps",
        (Query(rate("refusals_total", "reason"), "{{reason}}"),),
    )
    yield Panel(
        "Errors per second", "reqps", (Query(rate("http_errors_total", "type, code"), "{{type}} {{code}}"),)
    )
    yield Panel(
        "Streams",
        "short",
        (
            Query(f"sum(mmengine_http_streams_open{{{OWN}}})", "open"),
            Query(f"sum(mmengine_requests_preparing{{{OWN}}})", "in preparation"),
        ),
    )
    yield Panel(
        "Finished streams per second", "reqps", (Query(rate("http_streams_total", "how"), "{{how}}"),)
    )
    yield Panel(
        "Client disconnects per second",
        "reqps",
        (Query(rate("http_clients_left_total"), "before their answer"),),
    )
    yield Panel("Request body bytes per second", "Bps", (Query(rate("http_body_bytes_total"), "bodies"),))
    yield Panel("Stream events per second", "short", (Query(rate("http_frames_total"), "events"),))
    yield Panel("Event loop lag", "s", tuple(quantiles("mmengine_event_loop_lag_seconds", OWN)))
    yield Panel("Preparation time", "s", tuple(quantiles("mmengine_request_preparation_seconds", OWN)))
    yield Panel("Ready", "short", (Query(f"min by (instance) (mmengine_ready{{{OWN}}})", "{{instance}}"),))
    yield Panel("Log bytes per second", "Bps", (Query(rate("log_bytes_total"), "log"),))


def drawn(panel: Panel, number: int) -> dict[str, object]:
    place = {"w": WIDTH, "h": HEIGHT, "x": number % PER_ROW * WIDTH, "y": number // PER_ROW * HEIGHT}
    source = {"type": "prometheus", "uid": "${source}"}
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": source,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(65 + place), "datasource": source, "expr": query.expr, "legendFormat": query.legend}
            for place, query in enumerate(panel.queries)
        ],
    }


def variable(name: str, query: str) -> dict[str, object]:
    return {
        "name": name,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "query": query,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "current": {"text": "All", "value": "$__all"},
    }


def dashboard(title: str, uid: str, names: Names, panels: list[Panel]) -> str:
    source = {"name": "source", "type": "datasource", "query": "prometheus"}
    variables = [source, variable("job", f"label_values({names.running}, job)")]
    variables.append(variable("instance", f'label_values({names.running}{{job=~"$job"}}, instance)'))
    if "model_name" in names.own:
        variables.append(variable("model_name", f"label_values({names.running}, model_name)"))
    drawing = {
        "title": title,
        "uid": uid,
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables},
        "panels": [drawn(panel, number) for number, panel in enumerate(panels)],
    }
    return json.dumps(drawing, indent=1) + "\n"


def dashboards() -> dict[str, str]:
    """Return the dashboards by file name."""
    both = [*engine_panels(OURS), *http_panels()]
    return {
        "mmengine.json": dashboard("mmengine", "mmengine", OURS, both),
        "mmengine-vllm-names.json": dashboard(
            "mmengine, by vLLM's names", "mmengine-vllm-names", VLLM, list(engine_panels(VLLM))
        ),
    }


if __name__ == "__main__":
    for name, text in dashboards().items():
        (HERE / name).write_text(text)
