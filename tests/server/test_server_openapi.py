"""Tests that answers and events match OpenAI's API description. The test server, `served`, checks each
call.
"""

import json

import jsonschema
import pytest

from mmengine.server.chat.field_tables import CHAT, COMPLETION
from mmengine.server.responses.field_table import RESPONSES
from tests.server.openai_answers import check, check_stream
from tests.server.openai_schemas import PAGE
from tests.server.running import served


@pytest.fixture(scope="module")
def server():
    with served() as one:
        yield one


CALLS = (
    {},
    {"n": 2},
    {"logprobs": True, "top_logprobs": 2},
    {"logprobs": True, "n": 2, "max_tokens": 1},
    {"stop": "L"},
    {"max_tokens": 2},
    {"structured_outputs": {"regex": "[A-Z]+"}, "stop": "L"},
)


@pytest.mark.parametrize("usage", [None, {"include_usage": True}])
@pytest.mark.parametrize("fields", CALLS)
def test_chat(server, fields, usage):
    assert server.chat("hello", **fields)[0] == 200
    server.events("hello", stream_options=usage, **fields)


@pytest.mark.parametrize("usage", [None, {"include_usage": True}])
@pytest.mark.parametrize(
    "fields", [{}, {"logprobs": 2}, {"echo": True, "n": 2}, {"max_tokens": 2}, {"prompt": ["a", "b"]}]
)
def test_completions(server, fields, usage):
    asked = {"prompt": "hello", **fields}
    assert server.call("/v1/completions", asked)[0] == 200
    asked = {**asked, "stream": True, "stream_options": usage}
    status, _, text = server.call("/v1/completions", asked)
    assert status == 200 and text.endswith("data: [DONE]\n\n")


def test_models_and_errors(server):
    check(server.call("/v1/models")[2], "ListModelsResponse")
    check(server.call("/v1/models/also-echo")[2], "Model")
    for found in (server.chat(model="x"), server.chat(zzz=1), server.call("/nowhere")):
        check(found[2], "ErrorResponse")


def test_each_of_openais_fields_is_in_our_tables():
    fields = json.loads(PAGE.read_text())["fields"]
    tables = (
        ("CreateChatCompletionRequest", CHAT),
        ("CreateCompletionRequest", COMPLETION),
        ("CreateResponse", RESPONSES),
    )
    for name, table in tables:
        assert set(fields[name]) <= {field.name for field in table}


def test_an_unlisted_field_is_detected(server):
    whole = server.chat("hello")[2]
    with pytest.raises(jsonschema.ValidationError, match="surprise"):
        check({**whole, "surprise": 1}, "CreateChatCompletionResponse")
    whole["choices"][0]["message"]["surprise"] = 1
    with pytest.raises(jsonschema.ValidationError, match="surprise"):
        check(whole, "CreateChatCompletionResponse")


@pytest.mark.parametrize(
    "spoilt",
    [
        lambda events: events[:-1],  # [DONE] is missing.
        lambda events: [*events[:-2], *events[-1:]],  # The choice does not end.
        lambda events: [*events[:-1], events[-2], events[-1]],  # The choice ends twice.
        lambda events: events[1:],  # The first delta, with the role, is missing.
    ],
)
def test_an_invalid_stream_is_detected(server, spoilt):
    events = server.events("hello")
    text = "".join(f"data: {each}\n\n" for each in spoilt(events))
    with pytest.raises(AssertionError):
        check_stream("/v1/chat/completions", text, {})
