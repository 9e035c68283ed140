"""Tests /metrics: our metrics, vLLM's names, and the dashboards' queries."""

import importlib.util
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mmengine.request import Request, SamplingParams
from mmengine.serve.requests import request_times
from mmengine.server.http.metrics import ENDS, REFUSALS
from tests.server.promql import lacking, samples_of, selectors
from tests.server.running import SlowEcho, events_past_the_deadline, opened, served, wait_for

GRAFANA = Path(__file__).parents[2] / "deploy" / "grafana"
VLLM_BOARDS = (Path(__file__).parent / "vllm_series.txt").read_text().split()


class Drafting(SlowEcho):
    drafters = [("suffix", 0)]  # noqa: RUF012


@pytest.fixture(scope="module")
def told():
    """Return /metrics after calls of all kinds."""
    with served(executor_class=Drafting, metrics_compat="vllm", ping_s=0.05) as one:
        for text in ("hello there" * 4, "hello there" * 4, "another one"):
            assert one.chat(text)[0] == 200
            one.events(text, n=2)
        assert one.chat(zzz=1)[0] == 400
        one.app.admission.is_draining = True
        assert one.chat()[0] == 503
        one.app.admission.is_draining = False
        connection = opened(one)
        assert b"200 OK" in connection.recv(4096)
        connection.close()
        wait_for(lambda: 'how="left"} 1.0' in one.call("/metrics")[2])
        wait_for(lambda: value(one.call("/metrics")[2], "mmengine_event_loop_lag_seconds_count"))
        yield one.call("/metrics")[2]


def value(text, name, **labels):
    """Return the value of the only series with these labels."""
    (found,) = [
        each.value for each in samples_of(text) if each.name == name and labels.items() <= each.labels.items()
    ]
    return found


@pytest.mark.parametrize("name", ["mmengine.json", "mmengine-vllm-names.json"])
def test_each_query_of_a_dashboard_has_data(told, name):
    samples, exprs = samples_of(told), []
    board = json.loads((GRAFANA / name).read_text())
    for panel in board["panels"]:
        for target in panel["targets"]:
            exprs.append(target["expr"])
            assert lacking(target["expr"], samples) == [], panel["title"]
    asked = {series for expr in exprs for series, _ in selectors(expr)}
    has_values = {each.name for each in samples if each.value > 0}
    # These gauges are 0 without running requests.
    now = {"running", "waiting", "preparing", "streams_open", "kv_"}
    unused = {"media", "mm_cache", "draft", "spec_decode", "preemptions", "log_bytes"}
    assert not {each for each in asked - has_values if not any(word in each for word in now | unused)}
    for each in board["templating"]["list"]:
        if each["type"] == "query":
            series = each["query"].removeprefix("label_values(").partition(",")[0].partition("{")[0]
            assert any(sample.name == series for sample in samples)


def test_a_query_without_data_is_detected(told):
    samples = samples_of(told)
    assert lacking('sum(rate(mmengine_stepz_total{job=~"$job"}[5m]))', samples) == ["mmengine_stepz_total"]
    assert lacking('sum(mmengine_requests_finished_total{reason="bored"})', samples) != []
    assert lacking('sum by (colour) (mmengine_ready{job=~"$job"})', samples) == ["mmengine_ready by colour"]
    assert lacking('mmengine_ready{model_name=~"$model_name"}', samples) == ["mmengine_ready"]
    for wrong in ("sum(mmengine_ready)", "avg_over_time(mmengine_ready{})"):
        with pytest.raises(ValueError, match="names"):
            lacking(wrong, samples)


def test_the_dashboards_are_current():
    spec = importlib.util.spec_from_file_location("write_dashboards", GRAFANA / "write.py")
    write = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(write)
    for name, text in write.dashboards().items():
        assert (GRAFANA / name).read_text() == text, "run: python deploy/grafana/write.py"


def test_vllms_dashboards_have_data(told):
    samples = samples_of(told)
    names = {each.name for each in samples}
    assert set(VLLM_BOARDS) - names == set()
    for each in samples:
        if each.name.startswith("vllm:"):
            assert {"model_name": "echo", "engine": "0"}.items() <= each.labels.items(), each
    for ours, theirs in (
        ("mmengine_output_tokens_total", "vllm:generation_tokens_total"),
        ("mmengine_time_to_first_token_seconds_count", "vllm:time_to_first_token_seconds_count"),
        ("mmengine_inter_token_seconds_sum", "vllm:inter_token_latency_seconds_sum"),
        ("mmengine_step_tokens_count", "vllm:iteration_tokens_total_count"),
        ("mmengine_cached_tokens_total", "vllm:prefix_cache_hits_total"),
    ):
        assert value(told, ours) == value(told, theirs) > 0
    stops = value(told, "vllm:request_success_total", finished_reason="stop")
    assert stops == value(told, "mmengine_requests_finished_total", reason="stop") == 9
    assert value(told, "http_requests_total", handler="/v1/chat/completions", status="4xx") == 1
    assert value(told, "http_requests_total", handler="/v1/chat/completions", status="5xx") == 1


def test_without_the_setting_vllms_names_are_absent():
    with served() as one:
        text = one.call("/metrics")[2]
    assert "vllm" not in text and "\nhttp_" not in text
    for reason in REFUSALS:
        assert f'mmengine_refusals_total{{reason="{reason}"}} 0.0' in text
    for how in ENDS:
        assert f'mmengine_http_streams_total{{how="{how}"}} 0.0' in text


def test_http_metrics(told):
    assert value(told, "mmengine_http_requests_total", route="/v1/chat/completions", code="200") == 7
    assert value(told, "mmengine_http_errors_total", code="unknown_parameter") == 1
    assert value(told, "mmengine_http_streams_total", how="whole") == 3
    assert value(told, "mmengine_http_clients_left_total") == 1
    assert value(told, "mmengine_refusals_total", reason="shutting_down") == 1
    assert value(told, "mmengine_http_frames_total") > 6 * len("another one")
    assert value(told, "mmengine_http_body_bytes_total") > 500
    assert value(told, "mmengine_http_streams_open") == 0


def test_refusals_are_counted_by_reason(tmp_path, monkeypatch):
    with served(max_bodies_bytes=2048) as one:
        assert one.chat("a" * 3000)[0] == 429
        one.app.admission.is_draining = True
        assert one.chat("a")[0] == 503
        one.app.admission.is_draining = False
        text = one.call("/metrics")[2]
    assert 'mmengine_refusals_total{reason="bodies_full"} 1.0' in text
    assert 'mmengine_refusals_total{reason="shutting_down"} 1.0' in text


def test_an_error_in_a_stream_is_counted():
    with served(executor_class=SlowEcho) as one:
        events_past_the_deadline(one)
        text = one.call("/metrics")[2]
    assert re.search(r'mmengine_http_errors_total\{code="deadline_exceeded",type="server_error"\} 1.0', text)
    assert 'mmengine_http_streams_total{how="error"} 1.0' in text


class Clock:
    """Replaces the module `time` in request_times."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


def test_request_times(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(request_times, "time", clock)
    times = request_times.RequestTimes()
    request = Request("a", np.zeros(7, np.int32), SamplingParams(max_tokens=9))
    other = Request("b", np.zeros(3, np.int32), SamplingParams(max_tokens=9))
    times.submitted(request, 1, prepared_s=2.0)
    times.submitted(other, 1, prepared_s=0.0)

    def step(seconds, admitted=(), ended=None, **tokens):
        clock.now += seconds
        news = [
            SimpleNamespace(
                request_id=name, token_ids=[1] * count, finish_reason="stop" if name == ended else None
            )
            for name, count in tokens.items()
        ]
        times.saw_step(news, admitted, 5)

    step(1, ["a"])
    step(4, ["b"], a=1)  # The first token of a.
    step(0.5, a=1, b=1)
    step(0.5, a=1, b=1)
    step(0.25, b=1)  # a was preempted.
    step(0.25, a=1, b=1)
    step(8, ["a"], ended="a", a=2, b=1)
    found = {
        each.name: each.value
        for family in times.collect()
        for each in family.samples
        if "le" not in each.labels
    }
    sums = {name.removeprefix("mmengine_").removesuffix("_sum"): value for name, value in found.items()}
    assert sums["request_preparation_seconds"] == 2 and sums["request_queue_seconds"] == 1 + 5
    assert sums["time_to_first_token_seconds"] == (2 + 1 + 4) + 5.5
    assert sums["request_prefill_seconds"] == 4 + 0.5
    assert sums["inter_token_seconds"] == (0.5 + 0.5 + 0.5 + 8) + (0.5 + 0.25 + 0.25 + 8)
    assert found["mmengine_inter_token_seconds_count"] == 8
    assert sums["request_decode_seconds"] == 9.5 and sums["request_inference_seconds"] == 13.5
    assert sums["time_per_output_token_seconds"] == 9.5 / 5
    assert sums["request_seconds"] == 2 + 1 + 4 + 9.5 and sums["request_output_tokens"] == 6
    assert sums["request_prompt_tokens"] == 7 and sums["step_tokens"] == 35
