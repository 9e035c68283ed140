"""Tests of tools over HTTP: streams, answers without streaming and the engine's `chat` give the same
results.
"""

import asyncio
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import jsonschema
import msgspec
import pytest

from mmengine import AsyncEngine, Prompt
from mmengine.replay.queries.request_names import find_requests
from mmengine.serve.text import choice_deltas as deltas
from mmengine.structured_output.json_schema.validation import find_violation
from tests.serve.serve_fakes import EchoExecutor
from tests.serve.test_serve_chat import JSON_TEMPLATE, ONE, QUESTION, SHAPES, TOOLS, UNIQUE, tool
from tests.server.running import served

ROOT = Path(__file__).parents[2]
CALLS = (
    '<tool_call>\n{"name": "area", "arguments": {"note": "</tool_call> é日"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": { }}\n</tool_call>'
)


class Saying(EchoExecutor):
    """An executor that answers with the unchanged prompt."""

    def answer_to(self, prompt):
        return prompt


@pytest.fixture(scope="module")
def echo():
    with served(executor_class=Saying, max_tools=3, reattach_s=0) as one:
        yield one


@pytest.fixture(scope="module")
def embedded():
    with served(AsyncEngine(), chat_template=JSON_TEMPLATE, reattach_s=0) as one:
        yield one


def summed(events):
    """Return (message from all deltas, finish reasons) for each choice index."""
    found = {}
    for event in map(json.loads, events[:-1]):
        for choice in event["choices"]:
            message, reasons = found.setdefault(choice["index"], ({}, []))
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
            delta = choice["delta"]
            message["content"] = message.get("content", "") + delta.get("content", "")
            message["reasoning_content"] = message.get("reasoning_content", "") + delta.get(
                "reasoning_content", ""
            )
            for part in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                if "id" in part:
                    assert part["index"] == len(calls) and part["function"]["arguments"] == ""
                    function = {"name": part["function"]["name"], "arguments": ""}
                    calls.append({"id": part["id"], "function": function, "type": part["type"]})
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    return found


def test_frames_add_up_to_the_whole_answer(echo):
    fields = {"tools": TOOLS, "n": 2, "request_id": "r"}
    status, headers, body = echo.chat(f"Hm. {CALLS}", **fields)
    assert status == 200 and "x-mmengine-unenforced-tools" not in headers
    found = summed(echo.events(f"Hm. {CALLS}", **fields))
    for choice in body["choices"]:
        message, reasons = found[choice["index"]]
        assert reasons == [choice["finish_reason"]] == ["tool_calls"]
        assert message["tool_calls"] == choice["message"]["tool_calls"]
        assert message["content"] == choice["message"]["content"] == "Hm."
        assert [call["function"]["arguments"] for call in message["tool_calls"]] == [
            '{"note": "</tool_call> é日"}',
            "{ }",
        ]
    assert len({call["id"] for message, _ in found.values() for call in message["tool_calls"]}) == 4


LOOSE = tool({**SHAPES, "properties": {"all": UNIQUE}, "required": []})
UNIQUE_CALL = '<tool_call>\n{"name": "area", "arguments": {"all": [1, 1]}}\n</tool_call>'


@pytest.mark.parametrize(
    ("content", "fields"),
    [
        (f"<think>hm é</think>Hm. {CALLS}", {"tools": TOOLS, "n": 2}),
        (UNIQUE_CALL, {"tools": [LOOSE]}),
        ("some text here", {"tools": TOOLS, "stop": ["text"]}),
        ("é日", {"max_tokens": 4}),
    ],
)
def test_events_are_the_chunks_of_the_engine_byte_for_byte(echo, content, fields):
    """Not compared: the id's prefix, the time and the model's name, which HTTP adds."""
    fields = {"max_tokens": 300, "request_id": "r", **fields}

    async def chunks():
        messages = [{"role": "user", "content": content}]
        return [chunk async for chunk in echo.engine.stream_chat(messages, **fields)]

    told = asyncio.run(chunks())
    *events, done = echo.events(content, **fields)
    assert done == "[DONE]" and len(events) == len(told) > 3
    for index in range(fields.get("n", 1)):
        of_one = [chunk for chunk in told if chunk.choices[0].index == index]
        found = [each for each in events if json.loads(each)["choices"][0]["index"] == index]
        for chunk, event in zip(of_one, found, strict=True):
            (choice,), said = chunk.choices, json.loads(event)["choices"][0]
            assert f'"delta":{msgspec.json.encode(choice.delta).decode()},' in event
            assert said["finish_reason"] == choice.finish_reason
            assert said.get("stop_reason") == choice.stop_reason
            errors = msgspec.to_builtins(choice.argument_errors)
            assert said.get("argument_errors", []) == list(errors)


def test_the_log_finds_the_answers_that_made_a_call_by_its_id(tmp_path):
    """Checks ids from chat completions with several choices, from responses, and from messages."""
    flat = [{"type": "function", **each["function"]} for each in TOOLS]
    own = [{"name": each["name"], "input_schema": each["parameters"]} for each in flat]
    with served(executor_class=Saying, engine_options={"log": tmp_path / "log"}) as one:
        _, _, chat = one.chat(CALLS, tools=TOOLS, n=2, request_id="r")
        _, _, response = one.respond(CALLS, tools=flat)
        body = {"messages": [{"role": "user", "content": CALLS}], "tools": own, "max_tokens": 400}
        _, _, message = one.call("/v1/messages", body)
    made = [
        (call["id"], f"r/{choice['index']}")
        for choice in chat["choices"]
        for call in choice["message"]["tool_calls"]
    ]
    items = [each for each in response["output"] if each["type"] == "function_call"]
    made += [(each["call_id"], response["id"].removeprefix("resp_")) for each in items]
    blocks = [each for each in message["content"] if each["type"] == "tool_use"]
    made += [(each["id"], message["id"].removeprefix("msg_")) for each in blocks]
    assert len(made) == 8
    for call, name in made:
        assert find_requests(tmp_path / "log", call) == [name]


def test_usage_counts_up_over_the_frames_of_calls(echo):
    # With continuous_usage_stats, each event has the number of completion tokens so far.
    options = {"include_usage": True, "continuous_usage_stats": True}
    *found, last, _ = echo.events(f"Hm. {CALLS}", tools=TOOLS, stream_options=options)
    counts = [json.loads(each)["usage"]["completion_tokens"] for each in found]
    assert counts[0] == 0 and counts == sorted(counts) and len(set(counts)) > 10
    assert counts[-1] == json.loads(last)["usage"]["completion_tokens"]


def test_an_answer_of_calls_alone_has_no_content(echo):
    message = echo.chat(CALLS, tools=TOOLS)[2]["choices"][0]["message"]
    assert message["content"] is None and len(message["tool_calls"]) == 2
    cut = echo.chat(CALLS, tools=TOOLS, max_tokens=60)[2]["choices"][0]
    assert cut["finish_reason"] == "length"
    assert cut["message"]["tool_calls"][0]["function"]["arguments"] == '{"note": "</tool_c'
    for fields in ({}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}):
        assert echo.chat(CALLS, **fields)[2]["choices"][0]["message"]["content"] == CALLS
    named = {"type": "function", "function": {"name": "now"}}
    assert echo.chat(CALLS, tools=TOOLS, tool_choice=named)[2]["choices"][0]["finish_reason"] == "stop"
    assert echo.chat("text", tools=TOOLS)[2]["choices"][0]["message"]["content"] == "text"


def test_stop_strings_end_the_text_beside_tools(echo):
    choice = echo.chat("some text here", tools=TOOLS, stop="text")[2]["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "text")
    assert choice["message"]["content"] == "some "


def test_reasoning_is_hidden_and_counted(echo):
    text = "<think>so so</think>yes"
    shown, hidden = (echo.chat(text, tools=TOOLS, include_reasoning=each)[2] for each in (None, False))
    assert shown["choices"][0]["message"]["reasoning_content"] == "so so"
    assert "reasoning_content" not in hidden["choices"][0]["message"]
    for each in (shown, hidden):
        assert each["choices"][0]["message"]["content"] == "yes"
        assert each["usage"]["completion_tokens_details"]["reasoning_tokens"] > 5
    events = echo.events(text, tools=TOOLS, include_reasoning=False)
    assert not any("reasoning_content" in event for event in events)


def test_reasoning_fields_both():
    # With reasoning_fields="both", the reasoning is in `reasoning` and in `reasoning_content`.
    with served(executor_class=Saying, reasoning_fields="both") as one:
        text = "<think>so so</think>yes"
        message = one.chat(text)[2]["choices"][0]["message"]
        assert message["reasoning"] == message["reasoning_content"] == "so so"
        deltas = [json.loads(each)["choices"][0]["delta"] for each in one.events(text)[:-1]]
        said = [[delta.get(name, "") for delta in deltas] for name in ("reasoning", "reasoning_content")]
        assert said[0] == said[1] and "".join(said[0]) == "so so"


def test_unenforced_tools_are_named_in_a_header(echo):
    loose, text = LOOSE["function"]["parameters"], UNIQUE_CALL
    said = [{"call": 0, "message": "uniqueItems is violated at #/all"}]
    _, headers, body = echo.chat(text, tools=[tool(loose)])
    assert headers["x-mmengine-unenforced-tools"] == "area"
    assert body["choices"][0]["argument_errors"] == said
    last = json.loads(echo.events(text, tools=[tool(loose)])[-2])
    assert last["choices"][0]["argument_errors"] == said
    status, _, body = echo.chat(text, tools=[tool(loose, strict=True)])
    assert status == 400 and body["error"]["param"] == "tools[0].function.parameters"
    assert "uniqueItems at #/properties/all/uniqueItems" in body["error"]["message"]


def test_arguments_are_validated_beside_the_event_loop(echo, monkeypatch):
    threads = []

    def look(schema, text):
        threads.append(threading.current_thread())
        time.sleep(0.05)  # Meanwhile the other answer ends too.
        return find_violation(schema, text)

    monkeypatch.setattr(deltas, "find_violation", look)
    _, _, body = echo.chat(UNIQUE_CALL, tools=[LOOSE], n=2)
    assert all(each["argument_errors"] for each in body["choices"])
    events = [json.loads(each) for each in echo.events(UNIQUE_CALL, tools=[LOOSE], n=2)[:-1]]
    ends = [each["choices"][0] for each in events if each["choices"][0]["finish_reason"]]
    assert [(each["index"], bool(each["argument_errors"])) for each in ends] == [(0, True), (1, True)]
    assert len(threads) == 4 and echo._thread not in threads


def test_strict_tools_refuses_unenforceable_schemas():
    with served(strict_tools=True) as one:
        status, _, body = one.chat("x", tools=[tool({"properties": {"all": UNIQUE}})])
        assert (status, body["error"]["param"]) == (400, "tools[0].function.parameters")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": TOOLS * 2}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": {}}, "tools"),
        ({"tools": TOOLS, "tool_choice": "x"}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {
                "messages": [
                    QUESTION,
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
                ]
            },
            "messages[1].tool_calls[0].function.arguments",
        ),
    ],
)
def test_invalid_tools_are_refused_by_field(echo, fields, param):
    status, _, body = echo.chat(**fields)
    assert (status, body["error"]["param"]) == (400, param), body


def test_the_engine_and_the_server_answer_alike(embedded):
    prompt = Prompt(messages=[QUESTION], template_options={"chat_template": JSON_TEMPLATE})
    answer = asyncio.run(embedded.engine.chat(prompt, tools=TOOLS, request_id="same", **ONE))
    _, _, body = embedded.call(
        "/v1/chat/completions", {"messages": [QUESTION], "tools": TOOLS, "request_id": "same", **ONE}
    )
    (choice,) = body["choices"]
    expected = {"refusal": None, **answer.message.as_json()}
    assert choice["message"] == expected and answer.message.tool_calls
    assert choice["finish_reason"] == answer.finish_reason
    ((message, _),) = summed(
        embedded.events(QUESTION["content"], tools=TOOLS, request_id="same", **ONE)
    ).values()
    assert message["tool_calls"] == choice["message"]["tool_calls"]


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS}])
def test_messages_are_tokenized_as_they_are_answered(embedded, fields):
    call = {"id": "c", "type": "function", "function": {"name": "area", "arguments": '{"side": 3}'}}
    messages = [
        {"role": "developer", "content": "Be brief.", "name": None},
        QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "9"},
    ]
    asked = {"messages": messages, **fields}
    usage = embedded.call("/v1/chat/completions", {**asked, "max_tokens": 2})[2]["usage"]
    assert embedded.call("/tokenize", asked)[2]["count"] == usage["prompt_tokens"]


def test_the_example_loops(embedded):
    # examples/tool_loop.py calls its tool and prints an answer.
    pytest.importorskip("openai")
    ran = subprocess.run(
        [sys.executable, ROOT / "examples" / "tool_loop.py", f"http://127.0.0.1:{embedded.port}/v1"],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    called, said = ran.stdout.split("\n", 1)
    assert called.startswith("count_corners({'shape': '") and said.strip()


def test_calls_and_structured_outputs_are_completed_in_streams(embedded):
    """With on_truncation "close", text that completes the structured output follows the answer that a stop
    string or max_tokens cut short. Without "close", the answer ends before the stop string.
    """
    text = {"type": "text", "on_truncation": "close"}
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    of = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    sampling = {"temperature": 1.5, "seed": 4, "n": 2}
    area = {"type": "function", "function": {"name": "area"}}
    for fields, reason, stop_reason in (
        ({"tools": TOOLS, "tool_choice": area, "max_tokens": 27, "response_format": text}, "stop", None),
        ({"response_format": of, "stop": ":", "max_tokens": 40}, "length", ":"),
        ({"response_format": {**of, "on_truncation": "close"}, "stop": ":", "max_tokens": 40}, "stop", ":"),
    ):
        status, _, body = embedded.chat(**fields, **sampling)
        assert status == 200, body
        found = summed(embedded.events(**fields, **sampling))
        for choice in body["choices"]:
            message, reasons = found[choice["index"]]
            content = choice["message"]["content"]
            assert reasons == [choice["finish_reason"]] == [reason]
            assert choice["stop_reason"] == stop_reason and message["content"] == (content or "")
            if "tools" in fields:
                given = json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])
                jsonschema.validate(given, SHAPES)
                theirs = [call["function"] for call in choice["message"]["tool_calls"]]
                assert [call["function"] for call in message["tool_calls"]] == theirs
            elif reason == "stop":
                jsonschema.validate(json.loads(content), schema)
            else:
                assert content == '{"a"'


def test_reasoning_is_ended_over_http_too(embedded):
    """The reasoning budget is set by vLLM's field, Qwen's field, or OpenAI's effort "none". After the
    reasoning, the structured answer follows.
    """
    number = {"type": "integer", "minimum": 0, "maximum": 99}
    schema = {"type": "object", "properties": {"a": number}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}, "reasoning": True}
    fields = {"response_format": form, "max_tokens": 60, "temperature": 0.0}
    for budget, most in (
        ({"thinking_token_budget": 5}, 5),
        ({"thinking_budget": 2}, 2),
        ({"reasoning_effort": "none"}, 0),
    ):
        status, _, body = embedded.chat(**fields, **budget)
        assert status == 200, body
        message = body["choices"][0]["message"]
        jsonschema.validate(json.loads(message["content"]), schema)
        assert bool(message.get("reasoning_content")) == bool(most)
        (streamed, _), *_ = summed(embedded.events(**fields, **budget)).values()
        assert streamed["content"] == message["content"]
        assert streamed["reasoning_content"] == message.get("reasoning_content", "")
        counted = body["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert counted >= most and counted < most + 12  # The text that ends reasoning has several tokens.
    assert embedded.chat(thinking_token_budget=-3)[2]["error"]["param"] == "thinking_token_budget"
