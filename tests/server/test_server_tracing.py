"""Tests the spans of calls with OpenTelemetry's in-memory exporter, and a server without OpenTelemetry."""

import subprocess
import sys

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from mmengine.errors import ConfigError
from mmengine.server.calls.tracing import Tracing
from tests.server.running import SlowEcho, served, wait_for
from tests.server.test_server_reattach import begin

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CHILDREN = ["preparation", "queue", "prefill", "decode"]


@pytest.fixture(scope="module")
def exporter():
    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def one(exporter):
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with served(executor_class=SlowEcho, tracing=lambda engine: Tracing(provider, engine)) as server:
        yield server


@pytest.fixture(autouse=True)
def spans(exporter):
    """Return a function that returns the server's span for the test's call, and its child spans sorted by
    start.
    """
    exporter.clear()

    def found(num_children=4):
        wait_for(lambda: len(exporter.get_finished_spans()) >= 1 + num_children)
        ended = exporter.get_finished_spans()
        (span,) = [each for each in ended if each.kind is SpanKind.SERVER]
        children = sorted((each for each in ended if each is not span), key=lambda each: each.start_time)
        assert all(each.parent.span_id == span.context.span_id for each in children)
        return span, children

    return found


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_is_a_span_with_child_spans(one, spans, stream):
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": f"r{stream}"}
    body = {"messages": [{"role": "user", "content": "a" * 30}], "stream": stream, "temperature": 0.5}
    status, told, _ = one.call("/v1/chat/completions", {**body, "seed": 7, "stop": ["x"]}, headers)
    span, children = spans()
    assert status == 200 and span.name == "chat echo"
    assert f"{span.context.trace_id:032x}" == TRACE and f"{span.parent.span_id:016x}" == PARENT
    assert told["traceparent"] == f"00-{TRACE}-{span.context.span_id:016x}-01"
    found = span.attributes
    assert found["gen_ai.operation.name"] == "chat" and found["gen_ai.request.model"] == "echo"
    assert (found["gen_ai.request.temperature"], found["gen_ai.request.seed"]) == (0.5, 7)
    assert found["gen_ai.usage.input_tokens"] == 30 and found["gen_ai.usage.output_tokens"] == 31
    assert found["gen_ai.response.finish_reasons"] == ("stop",)
    assert found["mmengine.request_id"] == f"r{stream}", "the request id in the log"
    assert found["gen_ai.response.id"] == f"chatcmpl-r{stream}", "the client's id"
    assert [each.name for each in children] == CHILDREN
    edges = [edge for each in children for edge in (each.start_time, each.end_time)]
    assert edges == sorted(edges) and edges[1:-1:2] == edges[2::2], (
        "each span begins where the previous span ends"
    )
    assert children[-1].end_time - children[-1].start_time > 30 * 1_000_000, (
        "30 steps of 2 ms, less some tolerance"
    )
    assert span.start_time <= edges[-1] <= span.end_time + 50_000_000


def test_answers_of_one_call_are_children_of_its_span(one, spans):
    assert one.call("/v1/completions", {"prompt": ["ab", "cd"], "n": 2, "max_tokens": 2})[0] == 200
    span, children = spans(16)
    assert span.name == "text_completion echo" and len(children) == 16
    assert span.attributes["gen_ai.request.choice.count"] == 2
    assert len({each.attributes["mmengine.request_id"] for each in children}) == 4


def test_spans_of_failed_and_abandoned_calls(one, spans, exporter):
    assert one.chat("bad")[0] == 400
    span, _ = spans(0)
    assert span.attributes["error.type"] == "invalid_media" and span.status.status_code is StatusCode.UNSET
    exporter.clear()
    begin(one, {"messages": [{"role": "user", "content": "a" * 190}], "stream": True}).close()
    span, children = spans()
    assert span.attributes["error.type"] == "left" and [each.name for each in children] == CHILDREN


def test_unsampled_callers_have_no_spans(one, exporter):
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    body = {"messages": [{"role": "user", "content": "hello"}]}
    told = one.call("/v1/chat/completions", body, headers)[1]["traceparent"]
    assert told.startswith(f"00-{TRACE}-") and told.endswith("-00")
    assert not exporter.get_finished_spans()


def test_opentelemetry_is_not_imported_without_tracing():
    program = (
        "import sys; sys.modules['opentelemetry'] = None; import mmengine.server.lifecycle.lifecycle; "
        "from mmengine.cli.serve_checks import check_tracing; "
        "from mmengine.server.settings import ServerSettings; "
        "check_tracing(ServerSettings()); "
        "check_tracing(ServerSettings.of({'otlp_traces_endpoint': 'http://localhost:4318/v1/traces'}))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert f"{ConfigError.__name__}: --otlp-traces-endpoint needs OpenTelemetry" in ran.stderr
