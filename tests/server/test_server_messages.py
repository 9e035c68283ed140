"""Tests of /v1/messages: requests, answers, errors, token counts, and repeated streams."""

import base64
import json

import pytest

from mmengine.errors import FieldPath
from mmengine.serve.chat.completion import AccumulatedChoice
from mmengine.server.chat.parsed_request import Envelope
from mmengine.server.http.field_names import Place
from mmengine.server.http.media_payloads import NO_PAYLOADS, in_data_fields, take_out
from mmengine.server.http.unsupported import Unsupported
from mmengine.server.messages.body import CountBody
from mmengine.server.messages.conversation import Conversation
from mmengine.server.messages.field_table import BLOCKS
from mmengine.server.messages.frames import MessagesFrames
from tests.pictures import scene
from tests.serve.serve_fakes import EchoExecutor
from tests.server.openai_answers import named_events
from tests.server.running import LONG_CONTEXT, Lasting, served
from tests.server.test_server_reattach import Leaving, begin, going_on
from tests.server.test_server_shutdown import ends
from tests.server.test_server_tools import CALLS, Saying

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in ("area", "now")]


def asked(content="hello", **fields):
    return {"max_tokens": 300, "messages": [{"role": "user", "content": content}], **fields}


@pytest.fixture(scope="module")
def echo():
    with served(executor_class=Saying, unsupported="strict") as one:
        yield one


def summed(text):
    """Check the order of a stream's events, and return the message that they add up to."""
    events = named_events(text)
    names = [name for name, _ in events]
    assert names[0] == "message_start" and names[-2:] == ["message_delta", "message_stop"]
    message, is_open = events[0][1]["message"], None
    partial = {}
    for name, event in events[1:-2]:
        if name == "content_block_start":
            assert is_open is None and event["index"] == len(message["content"])
            is_open = event["index"]
            message["content"].append(event["content_block"])
            continue
        assert event["index"] == is_open
        if name == "content_block_stop":
            is_open = None
            continue
        ((field, more),) = ((key, value) for key, value in event["delta"].items() if key != "type")
        if field == "partial_json":
            partial[is_open] = partial.get(is_open, "") + more
        else:
            message["content"][is_open][field] += more
    assert is_open is None
    for index, arguments in partial.items():
        message["content"][index]["input"] = json.loads(arguments)
    last = events[-2][1]
    return {**message, **last["delta"], "usage": {**message["usage"], **last["usage"]}}


@pytest.mark.parametrize(
    ("text", "fields", "kinds", "reason"),
    [
        ("hello", {}, ["text"], "end_turn"),
        ("hello", {"stop_sequences": ["lo"]}, ["text"], "stop_sequence"),
        ("hello", {"max_tokens": 2}, ["text"], "max_tokens"),
        ("hello", {"stop_sequences": ["he"]}, [], "stop_sequence"),
        (f"Hm. {CALLS}", {"tools": TOOLS}, ["text", "tool_use", "tool_use"], "tool_use"),
        (
            CALLS,
            {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "now"}},
            ["tool_use"] * 2,
            "tool_use",
        ),
        ("<think>so é</think>yes", {"thinking": {"type": "adaptive"}}, ["thinking", "text"], "end_turn"),
        (
            "<think>so</think>yes",
            {"thinking": {"type": "enabled", "budget_tokens": 90, "display": "omitted"}},
            ["text"],
            "end_turn",
        ),
    ],
)
def test_a_stream_adds_up_to_the_whole_message(echo, text, fields, kinds, reason):
    body = asked(text, **fields)
    status, headers, whole = echo.call(MESSAGES, body)
    assert status == 200 and whole["id"] == f"msg_{headers['request-id']}"
    assert [block["type"] for block in whole["content"]] == kinds
    assert whole["stop_reason"] == reason
    assert whole["stop_sequence"] == (fields["stop_sequences"][0] if reason == "stop_sequence" else None)
    streamed = summed(echo.call(MESSAGES, {**body, "stream": True})[2])
    for message in (whole, streamed):
        del message["id"]
        message["usage"]["input_tokens"] += message["usage"].pop("cache_read_input_tokens")
        for block in message["content"]:
            block.pop("id", None)
    assert streamed == whole


def test_an_incomplete_call_has_an_empty_input(echo):
    whole = echo.call(MESSAGES, asked(CALLS, tools=TOOLS, max_tokens=60))[2]
    assert whole["stop_reason"] == "max_tokens" and whole["content"][0]["input"] == {}


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ('{"x": 1}', '{"x":1}'),
        ('{"x": "\\ud83d"}', '{"x": "\\ud83d"}'),
        ('{"n": [1e999, -1e400]}', '{"n": [1e999, -1e400]}'),
        ('{"n": %s}' % ("9" * 5000), '{"n": %s}' % ("9" * 5000)),
        ('{"x": "\\ud83d', "{}"),
        ('{"n": 1e999, "x": NaN}', "{}"),
        ('["\\ud83d"]', "{}"),
        ('{"x": %s}' % ("[" * 5000 + "]" * 5000), "{}"),
    ],
)
def test_the_input_of_a_call_is_what_the_model_wrote(arguments, kept):
    """An object keeps the values that the model wrote. Other arguments, and too deeply nested objects, become
    an empty object.
    """
    choice = AccumulatedChoice(0, names=["f"], arguments=[[arguments]], finish_reason="stop")
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}
    usage["completion_tokens_details"] = {"reasoning_tokens": 0}
    whole = MessagesFrames("a", Envelope("messages", 0, "echo")).whole([choice], usage)
    assert f'"input":{kept}}}'.encode() in whole


def test_turns_become_messages_of_chat():
    said = Conversation(NO_PAYLOADS, Unsupported([], is_lenient=False))
    said.add_instructions([{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}])
    image = {"type": "image", "source": {"type": "url", "url": "https://a/b.png"}, "max_pixels": 4096}
    use = {"type": "tool_use", "id": "toolu_1", "name": "area", "input": {"side": 2}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [image], "is_error": False}
    said.add_input(
        [
            {"role": "user", "content": "a"},
            {"role": "user", "content": [image, {"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "c"},
                    use,
                ],
            },
            {"role": "user", "content": [result, {"type": "text", "text": "d"}]},
            {"role": "assistant", "content": "e"},
        ]
    )
    picture = {"type": "image_url", "image_url": {"url": "https://a/b.png"}, "max_pixels": 4096}
    calls = [{"id": "toolu_1", "type": "function", "function": {"name": "area", "arguments": {"side": 2}}}]
    assert said.finished() == [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": [{"type": "text", "text": "a"}, picture, {"type": "text", "text": "b"}]},
        {"role": "assistant", "reasoning_content": "hm", "content": "c", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "toolu_1", "content": [picture]},
        {"role": "user", "content": [{"type": "text", "text": "d"}]},
        {"role": "assistant", "content": "e"},
    ]
    assert said.continues_answer
    first = (
        FieldPath("messages", 0, "content"),
        FieldPath("messages", 1, "content", 0),
        FieldPath("messages", 1, "content", 1),
    )
    assert said.places[1] == Place(FieldPath("messages", 0), first)
    assert str(said.places[3].part(0)) == "messages[3].content[0].content[0]"
    assert str(said.places[4].part(0)) == "messages[3].content[1]"


def block(**fields):
    return asked([{"type": "text", "text": "a"}, fields])


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (asked(zzz=1), "zzz"),
        (asked(n=2), "n is not supported"),
        (asked(stop_sequences=["a"], stop="b"), "stop_sequences or stop"),
        (asked(max_tokens=0), "max_tokens must be"),
        (asked(temperature=-1), "temperature"),
        (asked(thinking={"type": "enabled"}), "thinking.budget_tokens"),
        (asked(tools=[{"type": "web_search_20250305", "name": "web_search"}]), "tools[0].type"),
        (asked(tools=[{"name": "a b", "input_schema": {}}]), "tools[0].name"),
        (asked(tools=[{"name": "a", "input_schema": {"type": 1}, "strict": True}]), "tools[0].input_schema"),
        (asked(tools=[{"name": "a", "input_schema": {}, "zzz": 1}]), "tools[0].zzz"),
        (asked(tools=TOOLS, tool_choice={"type": "required"}), "tool_choice.type"),
        (asked(tools=TOOLS, tool_choice={"type": "tool", "name": "x"}), "tool_choice.name"),
        (
            asked(output_config={"format": {"type": "json_schema", "schema": {"type": 1}}}),
            "output_config.format",
        ),
        (block(type="document"), "messages[0].content[1]"),
        (block(type="text", text="a", zzz=1), "messages[0].content[1].zzz"),
        (block(type="image", source={"type": "x"}), "messages[0].content[1].source.type"),
        (
            block(type="image", source={"type": "url", "url": "https://a/b"}),
            "messages[0].content[1].source is",
        ),
        (block(type="image", source={"type": "file", "file_id": "x"}), "source.file_id"),
        (asked([{"type": "tool_result", "tool_use_id": 1}]), "tool_use_id must be"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": []}, "messages"),
    ],
)
def test_errors_use_the_bodys_field_names(echo, body, says):
    status, _, found = echo.call(MESSAGES, body)
    assert (status, found["error"]["type"]) == (400, "invalid_request_error")
    assert says in found["error"]["message"]
    assert "function" not in found["error"]["message"] and "image_url" not in found["error"]["message"]


def test_errors_have_anthropics_format(echo, tmp_path):
    assert echo.call(MESSAGES, asked(), {"anthropic-version": "newest"})[0] == 400
    assert echo.call(MESSAGES, asked(), {"anthropic-version": "2023-06-01"})[0] == 200
    assert echo.call(MESSAGES, asked(model="x"))[2]["error"]["type"] == "not_found_error"
    assert echo.call(f"{MESSAGES}/batches", asked())[2]["error"]["type"] == "not_found_error"
    assert echo.call(MESSAGES)[0] == 405
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    config = {**LONG_CONTEXT, "max_num_seqs": 1, "max_waiting": 1}
    with served(key_file=keys, executor_class=Lasting, config=config, max_body_bytes=2048) as one:
        status, _, found = one.call(MESSAGES, asked(), {"x-api-key": "other"})
        assert (status, found["error"]["type"]) == (401, "authentication_error")
        key = {"x-api-key": "secret"}
        assert one.call(MESSAGES, asked(), key)[0] == 200
        status, _, found = one.call(MESSAGES, asked("a" * 4096), key)
        assert (status, found["error"]["type"]) == (413, "request_too_large")
        held = [begin(one, asked("a" * 60, max_tokens=20_000), key, MESSAGES) for _ in range(2)]
        status, headers, found = one.call(MESSAGES, asked(), key)
        assert (status, found["error"]["type"]) == (529, "overloaded_error")
        assert int(headers["retry-after"]) >= 1
        for connection in held:
            connection.close()
        one.executor.may_end.set()


def test_tokens_are_counted_as_a_message_has_them(echo):
    body = {"messages": [{"role": "user", "content": "hello"}], "tools": TOOLS}
    assert echo.call(COUNT, body)[2] == {"input_tokens": 5}
    assert echo.call(COUNT, {**body, "max_tokens": 1})[0] == 400
    assert "is no image" in echo.call(COUNT, asked("bad", max_tokens=None))[2]["error"]["message"]
    assert set(CountBody.__struct_fields__) < set(CountBody(messages=[{}]).whole().__struct_fields__)
    assert not echo.engine._open and not echo.app.admission.shares.num_open


def test_base64_of_data_fields_leaves_the_body():
    """Long base64 in a field `data` is removed from the body before parsing."""
    image, text = base64.b64encode(scene(1, size=(200, 200)) * 9).decode(), '{"data": "' + "x" * 40_000
    source = {"type": "base64", "media_type": "image/png", "data": image}
    body = asked([{"type": "text", "text": text}, {"type": "image", "source": source}])
    for data in (json.dumps(body), json.dumps(body, separators=(",", ":"))):
        small, payloads = take_out(data.encode(), in_data_fields)
        assert len(small) < 50_000 < len(data)
        found = json.loads(small)["messages"][0]["content"]
        assert found[0]["text"] == text, "a text that looks like a field is not removed"
        assert payloads.of(found[1]["source"]["data"]) == base64.b64decode(image)
    assert {"cache_control"} <= {name for _, ignored in BLOCKS.values() for name in ignored}


def test_a_broken_stream_is_repeated_byte_for_byte(tmp_path):
    """After a restart, a client that repeats the call gets the same stream, with or without a request id."""
    log, headers = tmp_path / "log", {"x-request-id": "mine"}
    body = asked("x" * 150, stream=True, thinking={"type": "adaptive"})
    with served(executor_class=Leaving, drain_s=0, engine_options={"log": log}) as server:
        connections = [
            begin(server, body, headers, MESSAGES),
            begin(server, {**body, "top_k": 3}, None, MESSAGES),
        ]
    for connection in connections:
        connection.close()
    with going_on(log) as server:
        again = server.call(MESSAGES, body, headers)[2]
        assert server.call(MESSAGES, body, headers)[2] == again
        assert summed(server.call(MESSAGES, {**body, "top_k": 3})[2])["content"] == summed(again)["content"]
    assert list(ends(log).values()) == ["stop", "stop"], "each request ran once"
    with served(executor_class=EchoExecutor) as other:
        assert other.call(MESSAGES, body, headers)[2] == again
