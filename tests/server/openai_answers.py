"""Checks answers and streams against OpenAI's API description. tests/server/running.py calls these checks for
each answer.

DIFFERENCES lists the properties that we add to OpenAI's objects. Any other additional property fails the
check.
"""

import copy
import functools
import json
from typing import NamedTuple

import jsonschema

from tests.server.openai_schemas import PAGE

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_NULL = {"type": "null"}
_STOP_REASON = {"type": ["string", "integer", "null"]}


class Difference(NamedTuple):
    """A property of the object at `place` that OpenAI's schema lacks or declares differently."""

    place: tuple[str, ...]
    name: str
    schema: dict
    reason: str


def _in_choices(name):
    return (name, "choices", "items")


_ARGUMENT_ERRORS = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "properties": {"call": {"type": "integer"}, "message": {"type": "string"}},
        "required": ["call", "message"],
        "additionalProperties": False,
    },
}
_BOXES = {
    "type": "object",
    "additionalProperties": {
        "type": "object",
        "properties": {
            "pixels": {
                "anyOf": [{"type": "array", "items": {"type": "number"}, "minItems": 4, "maxItems": 4}, _NULL]
            },
            "problem": {"type": "string"},
        },
        "required": ["pixels"],
    },
}
_FIELDS = {
    "type": "object",
    "additionalProperties": {
        "type": "object",
        "properties": {
            **{name: {"type": "number"} for name in ("p", "min", "entropy")},
            "others": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"p": {"type": "number"}, "value": {}, "begins": {"type": "string"}},
                    "required": ["p"],
                    "additionalProperties": False,
                },
            },
        },
        "required": ["p", "min", "entropy", "others"],
        "additionalProperties": False,
    },
}
_BYTES = {"type": "array", "items": {"type": "integer"}}
_RESPONSES = (
    Difference(
        ("Response",), "store", {"type": "boolean"}, "OpenAI's answers have it, but its description does not"
    ),
    Difference(
        ("Response",),
        "usage",
        {"anyOf": [{"$ref": "#/components/schemas/ResponseUsage"}, _NULL]},
        "null until a response ends, as OpenAI's examples have it",
    ),
    Difference(("Response",), "argument_errors", _ARGUMENT_ERRORS, "as in the choices of chat"),
    Difference(("OutputTextContent",), "field_confidence", _FIELDS, "how sure the model was of each field"),
    Difference(("OutputTextContent",), "boxes", _BOXES, "boxes in pixels of the client's image"),
    *(
        Difference(("TextResponseFormatJsonSchema",), name, {"type": "boolean"}, "returned as sent")
        for name in ("field_confidence", "boxes")
    ),
    Difference(("ResponseLogProb",), "bytes", _BYTES, "as in the content part that the event belongs to"),
    Difference(("ResponseLogProb", "top_logprobs", "items"), "bytes", _BYTES, "the same"),
    *(
        Difference(
            (name,), "obfuscation", {"type": "string"}, "stream_options.include_obfuscation describes it"
        )
        for name in (
            "ResponseCustomToolCallInputDeltaEvent",
            "ResponseFunctionCallArgumentsDeltaEvent",
            "ResponseReasoningTextDeltaEvent",
            "ResponseTextDeltaEvent",
        )
    ),
    Difference(
        ("ResponseErrorEvent",),
        "error",
        {"$ref": "#/components/schemas/Error"},
        "OpenAI's clients raise an exception for it, as for an error in a stream of chat",
    ),
)
DIFFERENCES = (
    *_RESPONSES,
    Difference(("CreateCompletionResponse",), "obfuscation", {"type": "string"}, "as in chunks of chat"),
    *(
        Difference(
            _in_choices(name),
            "stop_reason",
            _STOP_REASON,
            "vLLM's: the stop string or token that ended the choice",
        )
        for name in (
            "CreateChatCompletionResponse",
            "CreateChatCompletionStreamResponse",
            "CreateCompletionResponse",
        )
    ),
    *(
        Difference(
            (name,),
            field,
            {"type": "string"},
            "the reasoning, under the names of vLLM, llama.cpp and litellm",
        )
        for name in ("ChatCompletionResponseMessage", "ChatCompletionStreamResponseDelta")
        for field in ("reasoning_content", "reasoning")
    ),
    *(
        Difference(
            _in_choices(name),
            "argument_errors",
            _ARGUMENT_ERRORS,
            "errors in the arguments of tools whose calls need not match their schemas",
        )
        for name in ("CreateChatCompletionResponse", "CreateChatCompletionStreamResponse")
    ),
    *(
        Difference((name,), "boxes", _BOXES, "boxes in pixels of the client's image")
        for name in ("ChatCompletionResponseMessage", "ChatCompletionStreamResponseDelta")
    ),
    *(
        Difference(place, "field_confidence", _FIELDS, "how sure the model was of each field")
        for place in (
            ("ChatCompletionResponseMessage",),
            ("ChatCompletionStreamResponseDelta",),
            _in_choices("CreateCompletionResponse"),
        )
    ),
    Difference(
        ("CompletionUsage", "prompt_tokens_details"),
        "video_tokens",
        {"type": "integer"},
        "beside OpenAI's image_tokens",
    ),
    Difference(("Model",), "root", {"type": "string"}, "vLLM's: the model's first name"),
    Difference(("Model",), "parent", {"type": ["string", "null"]}, "vLLM's: for an adapter, its model"),
    Difference(
        ("Model",),
        "max_model_len",
        {"type": "integer"},
        "vLLM's: limit for the tokens of a prompt and its answer",
    ),
)
# OpenAI's description has no events of /v1/completions. The events have the schema of the answer with the
# following differences.
_EVENT_DIFFERENCES = (
    Difference(
        _in_choices("CreateCompletionResponse"),
        "finish_reason",
        {"enum": ["stop", "length", None]},
        "null until a choice ends",
    ),
    Difference(
        ("CreateCompletionResponse",),
        "usage",
        {"anyOf": [{"$ref": "#/components/schemas/CompletionUsage"}, _NULL]},
        "null in all events but the last, as OpenAI's prose says, or the counts so far, as vLLM's",
    ),
)
_FIRST_ECHOED = Difference(
    (*_in_choices("CreateCompletionResponse"), "logprobs"),
    "token_logprobs",
    {"type": "array", "items": {"type": ["number", "null"]}},
    "null for the first token of an echoed prompt, which has no logprob; OpenAI's answers have it",
)
_FIRST_ECHOED_TOP = Difference(
    _FIRST_ECHOED.place,
    "top_logprobs",
    {
        "type": "array",
        "items": {"anyOf": [{"type": "object", "additionalProperties": {"type": "number"}}, _NULL]},
    },
    "the same",
)


@functools.cache
def _validator(name, is_event):
    schemas = copy.deepcopy(json.loads(PAGE.read_text())["schemas"])
    more = _EVENT_DIFFERENCES if is_event else ()
    for each in (*DIFFERENCES, *more, _FIRST_ECHOED, _FIRST_ECHOED_TOP):
        node = schemas[each.place[0]]
        for step in each.place[1:]:
            node = node["items"] if step == "items" else node["properties"][step]
            node = node["anyOf"][0] if "anyOf" in node else node
        node["properties"][each.name] = each.schema
    whole = {"$ref": f"#/components/schemas/{name}", "components": {"schemas": schemas}}
    jsonschema.Draft202012Validator.check_schema(whole)
    return jsonschema.Draft202012Validator(whole)


def check(value, name, *, is_event=False):
    """Raise jsonschema.ValidationError if a value does not match OpenAI's schema `name`."""
    _validator(name, is_event).validate(value)


def check_answer(path, status, body):
    """Check the body (an answer or an error) for a chat or completions call without streaming."""
    if status != 200:
        check(body, "ErrorResponse")
        return
    check(body, "CreateChatCompletionResponse" if path == CHAT else "CreateCompletionResponse")
    assert [choice["index"] for choice in body["choices"]] == list(range(len(body["choices"])))
    for choice in body["choices"]:
        _check_calls(choice.get("message", {}), choice["finish_reason"])


def _check_calls(message, finish_reason):
    calls = message.get("tool_calls") or []
    assert "tool_calls" not in message or calls, "an empty list of calls"
    assert len({call["id"] for call in calls}) == len(calls)
    if finish_reason == "tool_calls":
        assert calls


def events_of(text):
    """Return the data of all events in a stream; comments are skipped."""
    assert text.endswith("\n\n"), "a stream that ends within an event"
    found = []
    for event in text.split("\n\n")[:-1]:
        lines = [line for line in event.split("\n") if not line.startswith(":")]
        assert all(line.startswith("data: ") for line in lines), event
        if lines:
            found.append("\n".join(line.removeprefix("data: ") for line in lines))
    return found


def named_events(text):
    """Return the names and the decoded data of all events in a Responses stream; comments are skipped."""
    assert text.endswith("\n\n"), "a stream that ends within an event"
    found = []
    for event in text.split("\n\n")[:-1]:
        if event.startswith(":"):
            continue
        name, data = event.split("\n")
        assert name.startswith("event: ") and data.startswith("data: "), event
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
        assert found[-1][1]["type"] == found[-1][0]
    return found


def check_stream(path, text, asked):
    """Check a complete stream: each event, the order of the events, and [DONE] at the end. `asked`: the
    request's body.
    """
    events = events_of(text)
    assert events and events[-1] == "[DONE]" and events.count("[DONE]") == 1
    found = [json.loads(each) for each in events[:-1]]
    errors = [each for each in found if "error" in each]
    assert len(errors) <= 1 and found[-len(errors) :] == errors or not errors
    for each in errors:
        check(each, "ErrorResponse")
    chunks = found[: len(found) - len(errors)]
    name = "CreateChatCompletionStreamResponse" if path == CHAT else "CreateCompletionResponse"
    for each in chunks:
        check(each, name, is_event=True)
    assert len({(each["id"], each["created"], each["model"]) for each in chunks}) <= 1
    _check_usage(chunks, asked.get("stream_options") or {}, is_complete=not errors)
    _check_choices(path, chunks, is_complete=not errors)


def _check_usage(chunks, options, *, is_complete):
    if not options.get("include_usage"):
        assert all("usage" not in each and each["choices"] for each in chunks)
        return
    said = chunks[:-1] if is_complete else chunks
    assert all(each["choices"] for each in said)
    if options.get("continuous_usage_stats"):
        for each in said:
            counts = each["usage"]
            assert counts["prompt_tokens"] + counts["completion_tokens"] == counts["total_tokens"] > 0
    else:
        assert all(each["usage"] is None for each in said)
    if is_complete:
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["total_tokens"] > 0


def _check_choices(path, chunks, *, is_complete):
    """Check that each choice begins with its role, and ends with its only finish reason."""
    begun, ended, calls = set(), set(), {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            index = choice["index"]
            assert index not in ended, "output after the end of a choice"
            if path == CHAT:
                delta = choice["delta"]
                assert ("role" in delta) == (index not in begun)
                _check_call_deltas(calls, index, delta)
            begun.add(index)
            if choice["finish_reason"] is not None:
                ended.add(index)
                assert choice["finish_reason"] != "tool_calls" or any(key[0] == index for key in calls)
    assert not is_complete or (begun and ended == begun == set(range(len(begun))))


def _check_call_deltas(calls, index, delta):
    for call in delta.get("tool_calls") or ():
        key = (index, call["index"])
        if key not in calls:
            assert call["index"] == sum(other[0] == index for other in calls), "calls are counted from 0"
            assert call["id"] and call["type"] == "function" and call["function"]["name"]
            calls[key] = call["id"]
        else:
            assert call.get("id") in (None, calls[key]) and not call["function"].get("name")
        assert isinstance(call["function"].get("arguments", ""), str)
