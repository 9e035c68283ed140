"""Tests of /v1/responses. The test server checks all answers and events against OpenAI's API description and
its own OpenAPI document.
"""

import json
import socket

import msgspec
import pytest

from mmengine.events import vocabulary as ev
from mmengine.replay.checked_log import CheckedLog
from mmengine.request import SamplingParams
from mmengine.serve.text.choice_deltas import ChoiceDeltas
from mmengine.serve.text.reasoning import NO_REASONING
from mmengine.server.chat.parsed_request import Envelope
from mmengine.server.responses.frames import ResponsesFrames
from tests.serve.serve_fakes import EOS, ByteTokenizer
from tests.serve.test_serve_chat import SHAPES, TOOLS, UNIQUE
from tests.server.openai_answers import named_events
from tests.server.responses_answers import RESPONSES, check_events
from tests.server.running import SlowEcho, served, wait_for
from tests.server.test_server_shutdown import Leaving, all_of
from tests.server.test_server_tools import CALLS, UNIQUE_CALL, Saying

FLAT = [{"type": "function", **each["function"]} for each in TOOLS]
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


@pytest.fixture(scope="module")
def echo():
    with served(executor_class=Saying, max_schema_bytes=2000, reattach_s=0) as one:
        yield one


def events(server, given="hello", **fields):
    status, headers, text = server.respond(given, stream=True, **fields)
    assert status == 200 and headers["content-type"].startswith("text/event-stream"), text
    return [event for _, event in named_events(text)]


def without_time(response):
    assert response.pop("created_at") > 10**9
    return response


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        ("hello", {}),
        ("hello", LOGPROBS),
        ("<think>so é</think>Hm. " + CALLS, {"tools": FLAT}),
        (CALLS, {"tools": FLAT, "tool_choice": "required", "parallel_tool_calls": False}),
        (CALLS, {"tools": FLAT, "max_output_tokens": 60}),
        ("<think>so so</think>yes", {"include_reasoning": False}),
        ("<think>so so</think>yes", {"max_output_tokens": 9, "metadata": {"a": "b"}}),
        ("some text here", {"tools": FLAT, "stop": "text"}),
        ("hi", {"instructions": "Be brief.", "text": {"verbosity": "low"}}),
    ],
)
def test_a_stream_ends_with_what_the_whole_answer_is(echo, given, fields):
    fields = {"request_id": "r", **fields}
    status, headers, whole = echo.respond(given, cache_salt="one", **fields)
    assert status == 200 and headers["x-request-id"] == "r" and whole["id"] == "resp_r"
    last = events(echo, given, cache_salt="two", **fields)[-1]
    assert without_time(last["response"]) == without_time(whole)
    assert last["type"] == f"response.{whole['status']}"
    usage = whole["usage"]
    assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"]


def test_output_items(echo):
    body = echo.respond("<think>so é</think>Hm. " + CALLS, tools=FLAT)[2]
    reasoning, text, *calls = body["output"]
    assert reasoning["content"][0]["text"] == "so é" and text["content"][0]["text"] == "Hm."
    assert [each["name"] for each in calls] == ["area", "now"]
    assert calls[0]["arguments"] == '{"note": "</tool_call> é日"}'
    assert body["usage"]["output_tokens_details"]["reasoning_tokens"] > 3
    cut = echo.respond("hello", max_output_tokens=2)[2]
    assert (cut["status"], cut["output"][0]["content"][0]["text"]) == ("incomplete", "he")


def test_events_can_be_rebuilt_from_the_log(tmp_path):
    """The envelope in the log and the tokens suffice to render a stream again, byte for byte."""
    options = {"engine_options": {"log": tmp_path / "log"}, "storage": {"log": tmp_path / "log"}}
    with served(**options) as one:
        asked = {"input": "hello", "stream": True, "request_id": "mine", "metadata": {"a": "b"}}
        told = one.call(RESPONSES, asked)[2].encode()
    (queued,) = [r.event for r in CheckedLog(tmp_path / "log") if isinstance(r.event, ev.Queued)]
    envelope = msgspec.json.decode(queued.envelope, type=Envelope)
    frames = ResponsesFrames(queued.request_id, envelope, None)
    choice = ChoiceDeltas(ByteTokenizer(), SamplingParams(), NO_REASONING)
    deltas = choice.push([*b"HELLO", EOS])
    again = frames.first(0) + b"".join(frames.delta(0, delta) for delta in deltas)
    again += frames.finish(0, choice.finish(), "stop", None)
    assert told.startswith(again)
    (last,) = named_events(told[len(again) :].decode())
    assert last[0] == "response.completed" and last[1]["response"]["usage"]["output_tokens"] == 6
    assert json.loads(bytes(envelope.responses.input))[0]["content"][0]["text"] == "hello"


def test_unenforced_calls_are_validated(echo):
    loose = {
        "type": "function",
        "name": "area",
        "parameters": {**SHAPES, "properties": {"all": UNIQUE}, "required": []},
    }
    said = [{"call": 0, "message": "uniqueItems is violated at #/all"}]
    _, headers, body = echo.respond(UNIQUE_CALL, tools=[loose])
    assert headers["x-mmengine-unenforced-tools"] == "area" and body["argument_errors"] == said
    assert events(echo, UNIQUE_CALL, tools=[loose])[-1]["response"]["argument_errors"] == said


LARGE = {"type": "object", "properties": {"a" * 3000: {"type": "string"}}}
STRICT = {**FLAT[1], "parameters": {"type": "object", "properties": {"a": UNIQUE}}, "strict": True}


def form(schema):
    return {"format": {"type": "json_schema", "name": "a", "schema": schema}}


@pytest.mark.parametrize(
    ("given", "fields", "param"),
    [
        ("a" * 5000, {}, "input"),
        ("a", {"tools": [STRICT]}, "tools[0].parameters"),
        ("a", {"text": form({"type": "x"})}, "text.format.schema"),
        ("a", {"text": form(LARGE)}, "text.format"),
        ("a", {"text": {"format": {"type": "lark"}}}, "text.format.type"),
        ("a", {"text": {"format": {"type": "json_object"}}, "stop_token_ids": [1]}, "stop_token_ids"),
        ("a", {"temperature": -1}, "temperature"),
        ("a", {"background": True}, "background"),
    ],
)
def test_engine_errors_use_the_bodys_field_names(echo, given, fields, param):
    status, _, body = echo.respond(given, **fields)
    assert (status, body["error"]["param"]) == (400, param), body
    for word in ("response_format", ".function", "messages"):
        assert word not in body["error"]["message"]


def test_unknown_model_and_running_request_id(echo):
    """An unknown model and an invalid request id are refused."""
    assert echo.respond("a", model="x")[0] == 404
    assert echo.respond("a", request_id="a b")[2]["error"]["param"] == "request_id"


class Broken(SlowEcho):
    def collect(self):
        found = super().collect()
        if self._steps > 5:
            raise RuntimeError("the device fell over")
        return found


def test_a_failing_request_is_a_failed_response():
    with served(executor_class=Broken) as one:
        *told, last = events(one, "hello there", request_id="mine")
        assert one.respond("hello there")[0] == 500
    assert "".join(each["delta"] for each in told if "delta" in each) == "HELLO"
    error = last["response"]["error"]
    assert last["type"] == "response.failed" and error["code"] == "server_error"
    assert error["message"] == "request mine failed; the server's log says why"


def test_shutdown_does_not_end_a_response(tmp_path):
    """The stream ends with an error event and not with response.failed, because the response is not over."""
    body = json.dumps({"input": "a" * 300, "stream": True, "request_id": "mine"}).encode()
    head = b"POST /v1/responses HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    with served(executor_class=Leaving, drain_s=0, engine_options={"log": tmp_path / "log"}) as one:
        connection = socket.create_connection(("127.0.0.1", one.port))
        connection.sendall(head % len(body) + body)
        begun = connection.recv(4096)
        wait_for(lambda: one.engine._engine.stats().num_running)
        one.stop()
        text = (begun + all_of(connection)).partition(b"\r\n\r\n")[2]
    told = unchunked(text).decode()
    last = check_events(told)[-1]  # The error event repeats the number of the previous event.
    assert last["type"] != "error" and named_events(told)[-1][1]["error"]["code"] == "shutting_down"
    assert "[DONE]" not in told and "response.failed" not in told


def unchunked(data):
    """Decode a body with chunked transfer encoding."""
    found = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        found, data = found + data[: int(size, 16)], data[int(size, 16) + 2 :]
    return found
