"""Tests tools with the parameters of real functions. The functions are a sample from bfcl-eval's data (Apache
License 2.0).

Either a forced call is valid, or the server refuses the schema with an error that has the refused part's
JSON pointer.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import jsonschema
import pytest

from benchmarks.structured.functions import SAMPLE, checked, functions_in
from mmengine import AsyncEngine
from tests.server.running import served

ROOT = Path(__file__).parents[2]
WHOLE = [
    # In the virtual environment that `make clients` creates.
    *ROOT.glob("build/clients/python/lib/python3*/site-packages/bfcl_eval/data"),
]
TEMPLATE = ROOT / "examples" / "tool_calls.jinja"


@pytest.fixture(scope="module")
def server():
    with served(AsyncEngine(), chat_template=TEMPLATE.read_text()) as one:
        yield one


def closed(schema):
    """Return the schema as OpenAI's strict mode requires: objects allow only their named properties."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: closed(value) for name, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        found.setdefault("additionalProperties", False)
    return found


def ends(server):
    """Return a logit_bias for tokens that end a string or a value. Without the bias, the model would not end
    its answers.
    """
    bias = {}
    for text, value in (('"', 100), ("]", 50), ("}", 50)):
        (token,) = server.call("/tokenize", {"prompt": text})[2]["tokens"]
        bias[str(token)] = value
    return bias


def called(server, function):
    """Force the model to call `function`. Return the status, and the call's arguments or the error."""
    asked = {"max_tokens": 300, "seed": 3, "logit_bias": ends(server)}
    asked["response_format"] = {"type": "text", "on_truncation": "close"}
    named = {"type": "function", "function": {"name": function["name"]}}
    tool = {"type": "function", "function": {**function, "parameters": closed(function["parameters"])}}
    tool["function"]["strict"] = True
    status, _, answer = server.chat("Call it.", tools=[tool], tool_choice=named, **asked)
    if status != 200:
        return status, answer["error"]
    return status, answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]


def holds(server, function):
    """Check that the server refuses the tool if `checked` refuses the parameters, and otherwise that a forced
    call's arguments are valid. Return whether the tool was accepted.
    """
    report = checked(function)
    assert not isinstance(report, str), report
    status, found = called(server, function)
    if report.verdict == "refused":
        assert report.keyword or report.pointer != "#"
        assert status == 400 and report.pointer in found["message"], found
        return False
    assert status == 200, (function["name"], found)
    kind = jsonschema.Draft202012Validator
    kind(function["parameters"]).validate(json.loads(found))
    return True


def test_parameters_of_a_sample_are_enforced_or_refused(server):
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(partial(holds, server), functions_in(SAMPLE)))
    assert len(taken) > 20 and taken.count(False) == 3


@pytest.mark.soak
@pytest.mark.skipif(not WHOLE, reason="bfcl-eval's data is not there: make clients installs it")
def test_parameters_of_all_functions_are_enforced_or_refused(server):
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(partial(holds, server), functions_in(WHOLE[0])))
    assert len(taken) > 2000 and taken.count(False) < 30
