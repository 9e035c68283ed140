"""Tests that on_truncation "close" completes tool calls that would exceed the token budget.

The completed calls' arguments parse and match the tools' schemas, in both call formats and with any
tool_choice.
"""

import json

import jsonschema
import pytest

from mmengine import Engine
from mmengine.config import EngineConfig
from mmengine.errors import InvalidRequest, RequestFailed
from mmengine.replay.verify import verify
from mmengine.structured_output.request.tool_calls import OPEN
from tests.serve.test_serve_chat import AREA, TOOLS, prompt, tool

pytest.importorskip("mmengine_shapes")

PUT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 3},
        "count": {"type": "integer", "minimum": 5},
        "kind": {"enum": ["large", "larger"]},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 1},
        "more": {"type": "object"},
    },
    "required": ["name", "count", "kind", "tags"],
    "additionalProperties": False,
}
ALL = [*TOOLS, tool(PUT, "put", strict=True)]
SCHEMAS = {each["function"]["name"]: each["function"]["parameters"] for each in ALL}
CLOSE = {"type": "text", "on_truncation": "close"}
NAMED = {"type": "function", "function": {"name": "put"}}


@pytest.fixture(scope="module")
def engine():
    with Engine() as made:
        yield made


def check(message):
    for call in message.tool_calls or ():
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    return len(message.tool_calls or ())


@pytest.mark.parametrize("form", ["json", "xml"])
def test_calls_are_closed_at_each_budget(engine, form):
    least = {"json": (24, 27, 44), "xml": (24, 48, 86)}[form]
    for choice, reason, first in zip(("required", AREA, NAMED), ("tool_calls", "stop", "stop"), least):
        for more in (0, 1, 6, 20):
            options = {"max_tokens": first + more, "temperature": 1.5, "seed": more, "response_format": CLOSE}
            answer = engine.chat(prompt(form), tools=ALL, tool_choice=choice, **options)
            assert check(answer.message) >= 1 and answer.finish_reason == reason
            assert answer.usage["completion_tokens"] <= first + more
    with pytest.raises(RequestFailed, match="is not possible: the shortest answer found needs"):
        engine.chat(prompt(form), tools=ALL, tool_choice=NAMED, max_tokens=20, response_format=CLOSE)
    with pytest.raises(InvalidRequest, match="text has no format that could be completed"):
        engine.generate(["?"], response_format=CLOSE)


@pytest.mark.parametrize("form", ["json", "xml"])
def test_a_model_calls_tools_only_if_the_call_fits(engine, form):
    """A logit bias makes the model begin with a call."""
    begin = engine.processor.tokenizer.encode(OPEN)
    for max_tokens in (8, 30, 80):
        options = {"max_tokens": max_tokens, "temperature": 1.2, "seed": max_tokens}
        options["logit_bias"] = {begin[0]: 100.0} if len(begin) == 1 else dict.fromkeys(begin, 12.0)
        answer = engine.chat(prompt(form), tools=ALL, response_format=CLOSE, **options)
        assert answer.finish_reason in ("stop", "length", "tool_calls")
        assert (answer.finish_reason == "tool_calls") == bool(check(answer.message))
        plain = engine.chat(prompt(form), tools=ALL, **options)
        if plain.finish_reason == "stop":
            assert plain.message == answer.message
    free = engine.chat(prompt(form), tools=ALL, response_format=CLOSE, max_tokens=3, temperature=0.0)
    assert free.finish_reason == "length"  # a text without a call is cut, not completed


def test_a_schema_beside_tools_is_closed_too(engine):
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    asked = {"type": "json_schema", "json_schema": {"schema": schema}, "on_truncation": "close"}
    for max_tokens in (12, 14, 20, 40):
        for stop in (None, ":", '"', "e"):
            options = {"max_tokens": max_tokens, "temperature": 1.5, "seed": max_tokens, "stop": stop}
            answer = engine.chat(prompt("json"), tools=TOOLS, response_format=asked, **options)
            if not check(answer.message):
                jsonschema.validate(json.loads(answer.message.content), schema)
                assert answer.finish_reason == "stop"
            else:
                assert answer.finish_reason == "tool_calls"


def test_a_narrow_pool_changes_nothing_and_the_log_verifies(engine, tmp_path):
    def answers(one):
        found = []
        for form in ("json", "xml"):
            for seed, choice in enumerate(("required", NAMED, "auto")):
                options = {"max_tokens": 96, "temperature": 1.3, "seed": seed, "response_format": CLOSE}
                chat = one.chat(prompt(form), tools=ALL, tool_choice=choice, n=3, **options)
                found.append([choice.message.content for choice in chat.choices])
                found.append([choice.finish_reason for choice in chat.choices])
        return found

    config = EngineConfig(max_num_seqs=3, token_budget=64, num_blocks=48, max_model_len=640)
    with Engine(config=config, log=tmp_path / "log") as narrow:
        assert answers(narrow) == answers(engine)
        assert narrow.stats().num_preemptions > 0
    assert verify(tmp_path / "log").ok
