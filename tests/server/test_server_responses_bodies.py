"""Tests of the conversion of /v1/responses bodies to requests, without an engine."""

import base64
import hashlib
import json
import re

import msgspec
import pytest

from mmengine.errors import FieldPath
from mmengine.request import SamplingParams
from mmengine.server.chat.chat_reader import ChatReader
from mmengine.server.chat.message_media import PixelLimits
from mmengine.server.http.errors import ApiError
from mmengine.server.http.media_payloads import MIN_CHARS
from mmengine.server.responses.field_table import RESPONSES
from mmengine.server.responses.reader import ResponsesReader, previous_of
from mmengine.server.responses.response import ResponseObject
from tests.serve.test_serve_chat import SHAPES
from tests.server.openai_answers import check
from tests.server.test_server_asked import OPTIONS, SAMPLING
from tests.server.test_server_prompts import DEFAULTS, TOOLS

AREA = {"type": "function", "name": "area", "parameters": SHAPES, "description": "d"}
NOW = {"type": "function", "name": "now"}
CALL = {"type": "function_call", "call_id": "c", "name": "area", "arguments": '{"side": 1}'}


def read(given="hi", before=(), stored_media=lambda name: None, stores_responses=True, **fields):
    chat = ChatReader(DEFAULTS, 4096, "", PixelLimits.of(10**6, 2**16), TOOLS, False)
    reader = ResponsesReader(chat, ignore_unknown=False, stores_responses=stores_responses)
    return reader.read(json.dumps({"input": given, **fields}).encode(), "r", before, stored_media)


def messages(*given, **fields):
    (prompt,) = read(*given, **fields).prompts
    return prompt.messages


def echo(asked):
    return asked.envelope.responses


def items(asked):
    return json.loads(bytes(echo(asked).input))


def image(data, **more):
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    return {"type": "input_image", "image_url": url, **more}


def of_user(*parts):
    return [{"role": "user", "content": list(parts)}]


def test_items_become_messages():
    given = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        {
            "role": "assistant",
            "id": "msg_1",
            "type": "message",
            "status": "completed",
            "content": [
                {"type": "output_text", "text": "I ", "annotations": []},
                {"type": "refusal", "refusal": "am"},
            ],
        },
        CALL,
        {**CALL, "call_id": "d", "arguments": ""},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
        {"type": "function_call_output", "call_id": "d", "output": [{"type": "input_text", "text": "2"}]},
        CALL,
        {"role": "assistant", "content": "So."},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": None},
    ]
    found = messages(given, instructions="Sing.")
    calls = [
        {"id": name, "type": "function", "function": {"name": "area", "arguments": arguments}}
        for name, arguments in (("c", {"side": 1}), ("d", {}))
    ]
    assert found == [
        {"role": "system", "content": "Sing."},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "reasoning_content": "hm", "content": "I am", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
        {"role": "tool", "tool_call_id": "d", "content": "2"},
        {"role": "assistant", "content": "", "tool_calls": calls[:1]},
        {"role": "assistant", "content": "So."},
        {"role": "assistant", "content": "", "reasoning_content": "s"},
    ]


def test_a_text_is_one_message_and_items_are_repeated_with_ids():
    assert messages("hi") == [{"role": "user", "content": "hi"}]
    said = {"type": "output_text", "text": "x", "annotations": [], "logprobs": []}
    assert items(read("hi")) == [
        {
            "id": "msg_r_in0",
            "type": "message",
            "status": "completed",
            "role": "user",
            "content": [{"type": "input_text", "text": "hi"}],
        }
    ]
    found = items(
        read([{"role": "assistant", "content": "x", "id": "mine"}, {**CALL, "status": "incomplete"}])
    )
    assert found[0]["id"] == "mine" and found[0]["content"] == [said]
    assert found[1] == {"id": "fc_r_in1", "status": "incomplete", **CALL}
    assert items(read("hi", store=False)) == []
    assert items(read("hi", request_id="q"))[0]["id"] == "msg_q_in0"


# The small image is parsed with the body; the large image is removed before the body is parsed.
@pytest.mark.parametrize("size", [100, MIN_CHARS])
def test_media_are_repeated_as_hashes(size):
    data = bytes(range(256)) * (size // 256 + 1)
    name = hashlib.sha256(data).hexdigest()
    asked = read(of_user(image(data, detail="low", max_pixels=5000)))
    (part,) = asked.prompts[0].messages[0]["content"]
    assert part["image_url"] == {"url": data} and part["max_pixels"] == 5000
    assert asked.media == {name: data}
    (told,) = items(asked)[0]["content"]
    assert told == {
        "type": "input_image",
        "detail": "low",
        "max_pixels": 5000,
        "image_url": f"sha256:{name}",
    }
    output = [CALL, {"type": "function_call_output", "call_id": "c", "output": [image(data)]}]
    assert read(output).media == {name: data}
    with_breaks = base64.encodebytes(data).decode()
    part = {"type": "input_image", "image_url": f"data:image/png;base64,{with_breaks}"}
    assert read(of_user(part)).media == {name: data}


def test_errors_name_the_parts_of_a_tools_output():
    output = {"type": "function_call_output", "call_id": "c", "output": [image(b"x"), image(b"y")]}
    names = read([CALL, output, {"role": "user", "content": [image(b"z")]}]).field_names
    for chat, client in (((1, "content", 1), (1, "output", 1)), ((2, "content", 0), (2, "content", 0))):
        assert names.path(FieldPath("messages", *chat)) == FieldPath("input", *client)


def test_uploaded_images_are_named_by_their_ids():
    name = "file-" + "a" * 24
    asked = read(of_user({"type": "input_image", "file_id": name, "detail": "low"}))
    (upload,) = asked.uploads
    assert (upload.file_id, str(upload.where)) == (name, "input[0].content[0].file_id")
    (part,) = asked.prompts[0].messages[0]["content"]
    assert part["image_url"] is upload.part and part["max_pixels"]
    (told,) = items(asked)[0]["content"]
    assert told == {"type": "input_image", "detail": "low", "file_id": name} and not asked.media


def test_previous_items_precede_the_input():
    data, first = b"picture", read(of_user(image(b"picture"), {"type": "input_text", "text": "what?"}))
    said = {
        "id": "msg_r_0",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "a cat", "annotations": [], "logprobs": []}],
    }
    before = [*items(first), said]
    asked = read(
        [{"type": "item_reference", "id": "msg_r_0"}, {"role": "user", "content": "and?"}],
        before,
        {hashlib.sha256(data).hexdigest(): data}.get,
        previous_response_id="resp_r",
        instructions="Be brief.",
    )
    found = asked.prompts[0].messages
    assert [message["role"] for message in found] == ["system", "user", "assistant", "user"]
    assert found[1]["content"][0]["image_url"] == {"url": data}
    assert [item["role"] for item in items(asked)] == ["user"]  # Only the call's own input items.
    assert echo(asked).previous_response_id == "resp_r"
    (part,) = [each for each in items(first)[0]["content"] if each["type"] == "input_image"]
    # A call's own input must not name a media hash, because the data may belong to another client.
    with pytest.raises(ApiError, match="not stored"):
        read(of_user(part), before, lambda name: data, previous_response_id="resp_r")
    with pytest.raises(ApiError, match="not stored") as found:
        read("and?", before, previous_response_id="resp_r")
    assert found.value.body.param == "previous_response_id[0].content[0].image_url"
    assert previous_of(b'{"input": "a", "previous_response_id": "resp_r"}') == "resp_r"
    assert previous_of(b"{}") is None


def test_each_supported_field_reaches_the_engine():
    asked = read(
        "hi",
        **{**SAMPLING, "n": 1},
        **OPTIONS,
        max_output_tokens=11,
        thinking_token_budget=5,
        include=["message.output_text.logprobs", "reasoning.encrypted_content"],
        top_logprobs=2,
        include_reasoning=False,
        model="m",
        stream=True,
        stream_options={"include_obfuscation": True},
    )
    wanted = {**SAMPLING, "n": 1, "stop": ("x", "y"), "stop_token_ids": (3,), "logit_bias": {5: 2.0}}
    assert asked.sampling == SamplingParams(max_tokens=11, logprobs=2, **wanted)
    found = {name: getattr(asked, name) for name in OPTIONS}
    assert found == OPTIONS and asked.thinking_token_budget == 5 and not asked.show_reasoning
    assert asked.stream and asked.logprobs and asked.usage_frames == "last" and asked.envelope.model == "m"
    assert asked.envelope.is_obfuscated and not read("hi").envelope.is_obfuscated
    assert read("hi", reasoning={"effort": "none"}).thinking_token_budget == 0
    assert read("hi", reasoning={"effort": "low"}).thinking_token_budget is None
    assert read("hi", chat_template_kwargs={"a": 1}).prompts[0].template_options == {"a": 1}
    assert read("hi").sampling == SamplingParams(max_tokens=4096, temperature=1.0)


def test_a_response_repeats_its_parameters():
    told = echo(
        read(
            "hi",
            instructions="i",
            tools=[AREA, NOW],
            tool_choice={"type": "function", "name": "now"},
            parallel_tool_calls=False,
            reasoning={"effort": "high", "summary": "auto"},
            temperature=0.5,
            top_p=0.25,
            max_output_tokens=3,
            max_tool_calls=4,
            metadata={"a": "b"},
            user="u",
            safety_identifier="s",
            prompt_cache_key="k",
            service_tier="auto",
            truncation="disabled",
            background=True,
            stores_responses=True,
        )
    )
    assert json.loads(bytes(told.tools)) == [
        {"strict": None, **AREA},
        {"parameters": None, "strict": None, **NOW},
    ]
    check(json.loads(bytes(told.tools)), "ToolsArray")
    assert json.loads(bytes(told.tool_choice)) == {"type": "function", "name": "now"}
    assert json.loads(bytes(told.reasoning)) == {"effort": "high", "summary": None}
    assert (told.temperature, told.top_p, told.max_output_tokens, told.max_tool_calls) == (0.5, 0.25, 3, 4)
    assert (told.user, told.safety_identifier, told.prompt_cache_key) == ("u", "s", "k")
    assert told.background and told.store and not told.parallel_tool_calls and told.metadata == {"a": "b"}
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    asked = read("hi", text={"format": {**form, "on_truncation": "close"}, "verbosity": "low"})
    assert asked.answer_format.response_format == {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
        "on_truncation": "close",
    }
    told = json.loads(bytes(echo(asked).text))
    assert told == {"format": {**form, "on_truncation": "close"}, "verbosity": "low"}
    assert read("hi", text={"format": {"type": "json_object"}}).answer_format.response_format == {
        "type": "json_object"
    }
    assert not read("hi", text={"format": {"type": "text"}}).answer_format


def test_tools_are_converted_to_chat():
    calls = read("hi", tools=[AREA, NOW]).answer_format.calls.selection
    assert [tool.name for tool in calls.tools] == ["area", "now"] and calls.choice == "auto"
    assert calls.shown[0] == {"type": "function", "function": {k: AREA[k] for k in AREA if k != "type"}}
    named = read(
        "hi", tools=[AREA, NOW], tool_choice={"type": "function", "name": "now"}
    ).answer_format.calls.selection
    assert [tool.name for tool in named.tools] == ["now"] and named.choice == "named"
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "area"}]}
    asked = read(
        "hi", tools=[AREA, NOW], tool_choice=allowed, parallel_tool_calls=False
    ).answer_format.calls.selection
    assert (
        [tool.name for tool in asked.tools] == ["area"] and asked.choice == "required" and not asked.parallel
    )
    assert read("hi", tools=[AREA], tool_choice="none").answer_format.calls is None


PICTURE = image(b"a")
REFUSED = [
    ({"input": []}, "input"),
    ({"input": [{"type": "computer_call"}]}, "input[0].type"),
    ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input[0].type"),
    ({"input": [{"type": "message", "role": "tool", "content": "a"}]}, "input[0].role"),
    ({"input": [{"id": "msg_1"}]}, "input[0]"),
    ({"input": [{"type": "item_reference"}]}, "input[0]"),
    ({"input": [{"role": "user", "content": 1}]}, "input[0].content"),
    ({"input": of_user("a")}, "input[0].content[0]"),
    ({"input": of_user({"type": "input_file", "file_id": "f"})}, "input[0].content[0].type"),
    ({"input": of_user({"type": "input_image", "file_id": "f"})}, "input[0].content[0].file_id"),
    ({"input": of_user({**PICTURE, "file_id": "file-" + "a" * 24})}, "input[0].content[0].file_id"),
    ({"input": of_user({"type": "input_audio"})}, "input[0].content[0].type"),
    ({"input": of_user({**PICTURE, "detail": "most"})}, "input[0].content[0].detail"),
    ({"input": of_user({**PICTURE, "image_url": "sha256:aa"})}, "input[0].content[0].image_url"),
    ({"input": of_user({**PICTURE, "image_url": "iVBORw0KGgo"})}, "input[0].content[0].image_url"),
    ({"input": of_user({**PICTURE, "image_url": "data:text/x;base64,a"})}, "input[0].content[0].image_url"),
    ({"input": of_user({**PICTURE, "image_url": "https://a.org/b"})}, "input[0].content[0].image_url"),
    ({"input": of_user({**PICTURE, "image_url": "file:///a"})}, "input[0].content[0].image_url"),
    ({"input": of_user({"type": "output_text", "text": "a"})}, "input[0].content[0].type"),
    ({"input": [{"role": "assistant", "content": [PICTURE]}]}, "input[0].content[0].type"),
    ({"input": [{**CALL, "arguments": "{"}]}, "input[0].arguments"),
    ({"input": [{**CALL, "arguments": "[]"}]}, "input[0].arguments"),
    ({"input": [{**CALL, "call_id": None}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input[0].output"),
    ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0].encrypted_content"),
    ({"instructions": "a", "input": [{"role": "user", "content": "a"}] * 5000}, "input"),
    ({"input": of_user(*[{"type": "input_text", "text": ""}] * 5000)}, "input[0].content"),
    ({"tools": [NOW] * 200}, "tools"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "mcp", "server_label": "a"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "a"}}]}, "tools[0].function"),
    ({"tools": [{**NOW, "defer_loading": True}]}, "tools[0].defer_loading"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"tools": [NOW], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
    ({"tools": [NOW], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"metadata": {"a" * 65: "b"}}, "metadata"),
    ({"metadata": {"a": "b" * 513}}, "metadata[]"),
    ({"metadata": {str(n): "b" for n in range(17)}}, "metadata"),
    ({"metadata": {"a": 1}}, "metadata[]"),
    ({"include": ["file_search_call.results"]}, "include"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"top_logprobs": 99, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
    ({"text": {"format": {"type": "json_schema", "json_schema": {}}}}, "text.format.json_schema"),
    ({"text": {"tone": 1}}, "text.tone"),
    ({"reasoning": {"effort": "most"}}, "reasoning.effort"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"background": True}, "background"),
    ({"background": True, "store": False}, "store"),
    ({"previous_response_id": "resp_x"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "a"}}, "prompt"),
    ({"truncation": "auto"}, "truncation"),
    ({"n": 2}, "n"),
    ({"messages": []}, "messages"),
    ({"response_format": {"type": "text"}}, "response_format"),
    ({"stream": True, "stream_options": {"include_obfuscation": 1}}, "stream_options.include_obfuscation"),
    ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options.include_usage"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
    ({"zzz": 1}, "zzz"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda each: str(each)[:40])
def test_unsupported_fields_are_refused(fields, param):
    with pytest.raises(ApiError) as found:
        read(
            stores_responses=False,
            **{"given": "hi", **{"given" if k == "input" else k: v for k, v in fields.items()}},
        )
    assert (found.value.status, found.value.body.param) == (400, param), found.value
    assert not re.search(r"\bmessages\b", str(found.value)) or param == "messages"


def test_null_is_absence():
    nulls = {field.name: None for field in RESPONSES if field.name != "input"}
    asked = read(of_user({**PICTURE, "detail": None, "file_id": None}), **nulls)
    assert asked.envelope.responses.temperature == 1.0 and not asked.stream


def test_default_parameters_are_not_logged():
    """Default parameters are omitted from the log, but each answer repeats them."""
    said = {"tool_choice": "auto", "tools": [], "text": {"format": {"type": "text"}}, "reasoning": {}}
    for asked in (read(), read(**said)):
        kept = json.loads(msgspec.json.encode(echo(asked)))
        assert kept.keys() <= {"temperature", "top_p", "input"}
        body = json.loads(ResponseObject("r", asked.envelope).of("queued"))
        assert {name: body[name] for name in said} == {
            **said,
            "text": {"format": {"type": "text"}, "verbosity": "medium"},
            "reasoning": {"effort": None, "summary": None},
        }
    kept = json.loads(msgspec.json.encode(echo(read(tool_choice="none", reasoning={"effort": "low"}))))
    assert (kept["tool_choice"], kept["reasoning"]["effort"]) == ("none", "low")
