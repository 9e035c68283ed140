"""vLLM's options for response formats mean the same as ours, or are refused by name."""

import json
from dataclasses import dataclass
from typing import Any

import pytest

from mmengine.errors import InvalidRequest
from mmengine.serve.prompt.options import FORM, GENERATE
from mmengine.serve.prompt.vllm_options import as_form
from mmengine.serve.text.response_format import response_format_of

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
TAG = {
    "structures": [{"begin": "<a>", "schema": {"type": "object"}, "end": "</a>"}],
    "triggers": ["<a>"],
}
EBNF = 'root ::= "a" | "b"'


@dataclass
class StructuredOutputsParams:
    """Some fields of vLLM's class with this name."""

    json: Any = None
    regex: str | None = None
    disable_any_whitespace: bool = False
    disable_fallback: bool = False
    _backend: str | None = "xgrammar"


@pytest.mark.parametrize(
    ("options", "form"),
    [
        ({"structured_outputs": {"json": SCHEMA}}, (FORMAT, None)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}}, (FORMAT, None)),
        ({"structured_outputs": StructuredOutputsParams(json=SCHEMA)}, (FORMAT, None)),
        ({"structured_outputs": {"regex": "a+"}}, (None, {"regex": "a+"})),
        ({"structured_outputs": {"choice": ["a", "b"]}}, (None, {"choice": ["a", "b"]})),
        ({"structured_outputs": {"json_object": True}}, ({"type": "json_object"}, None)),
        ({"structured_outputs": {"grammar": EBNF}}, (None, {"gbnf": EBNF})),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, (None, {"lark": 'start: "a"'})),
        (
            {"structured_outputs": {"structural_tag": json.dumps(TAG)}},
            ({"type": "structural_tag", **TAG}, None),
        ),
        ({"guided_json": SCHEMA, "guided_decoding_backend": "auto"}, (FORMAT, None)),
        ({"guided_regex": "a+", "guided_json": None}, (None, {"regex": "a+"})),
        ({"guided_choice": ["a"]}, (None, {"choice": ["a"]})),
        ({"guided_grammar": EBNF}, (None, {"gbnf": EBNF})),
        ({"guided_json_object": True}, ({"type": "json_object"}, None)),
        ({"guided_json_object": False}, (None, None)),
        ({"max_tokens": 3}, (None, None)),
    ],
)
def test_translated(options: dict[str, Any], form: tuple[Any, Any]) -> None:
    assert as_form(options) == form
    ours = {"response_format": form[0], "grammar": form[1]}
    assert response_format_of(options) == response_format_of(ours)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex each request an answer format"),
        ({"guided_json": SCHEMA, "response_format": FORMAT}, "response_format and guided_json each request"),
        (
            {"structured_outputs": {"json": SCHEMA, "regex": "a"}},
            "structured_outputs must contain exactly one of json, regex",
        ),
        ({"structured_outputs": {}}, "structured_outputs must contain exactly one of"),
        ({"structured_outputs": "json"}, "structured_outputs must be an object"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn is unknown; known are json"),
        ({"guided_json": "{"}, "guided_json is not JSON"),
        ({"guided_json": "[" * 100_000}, "guided_json is not JSON"),
        ({"guided_json": "5"}, "a schema must be an object"),
        ({"guided_json_object": 1}, "guided_json_object must be true or false"),
        ({"guided_decoding_backend": "outlines"}, "grammar_backend"),
        ({"guided_regex": "a", "guided_whitespace_pattern": " ?"}, "white space is bounded with"),
        (
            {"structured_outputs": StructuredOutputsParams(regex="a", disable_any_whitespace=True)},
            "bounded with",
        ),
        (
            {"structured_outputs": {"regex": "a", "disable_additional_properties": True}},
            "additionalProperties",
        ),
        ({"structured_outputs": {"structural_tag": {"format": {}}}}, "unknown field 'format'"),
        ({"guided_choice": "ab"}, "grammar.choice must be a list"),
    ],
)
def test_refused_by_name(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        response_format_of(options)
    assert says in str(refusal.value)


def test_every_name_is_an_option() -> None:
    assert FORM - {"calls"} <= GENERATE  # GENERATE has no `calls`, because only chat accepts tools
