"""Tests that additional keys may be any keys except the named keys, which are excluded in every JSON
spelling.
"""

import json

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmengine.structured_output.json_schema.normalization import Bounds
from tests.structured.accepting import Grammar

A = {"type": "string"}
NAMES = st.text('ab\n\x01é"\\', max_size=3)
VALUES = st.sampled_from([1, "x", None, [1], {"y": 2}])


def respelled(text: str) -> str:
    return '"' + "".join(f"\\u{ord(char):04x}" for char in text) + '"'


@pytest.mark.parametrize("bounds", [Bounds(), Bounds.off(), Bounds(key=2)])
@pytest.mark.parametrize("rest", [True, {"type": "integer"}, {"type": "object"}])
def test_no_spelling_of_a_named_key_is_another_key(bounds: Bounds, rest: dict | bool) -> None:
    schema = {
        "type": "object",
        "properties": {"ab": A, "a\n\x01": A, "\x7f": A},
        "additionalProperties": rest,
    }
    grammar = Grammar(schema, bounds)
    for name in schema["properties"]:
        for key in (json.dumps(name), f'"{name}"', respelled(name)):
            assert not grammar.accepts("{" + key + ":1}"), key
            assert not grammar.accepts("{" + key + ":{}}"), key


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.dictionaries(NAMES, st.sampled_from([{"const": 1}, {}, False])),
    st.dictionaries(NAMES, VALUES, max_size=4),
)
def test_keys_are_distinguished_as_by_the_validator(named: dict, instance: dict) -> None:
    schema = {"type": "object", "properties": named, "additionalProperties": {"enum": ["x", None]}}
    ordered = {key: instance[key] for key in (*named, *instance) if key in instance}
    valid = jsonschema.Draft202012Validator(schema).is_valid(ordered)
    assert Grammar(schema).accepts(json.dumps(ordered, ensure_ascii=False)) == valid


def test_a_named_key_has_its_own_schema() -> None:
    grammar = Grammar({"properties": {"a": A}, "type": "object", "additionalProperties": {"type": "integer"}})
    assert grammar.accepts('{"a": "x", "b": 1}') and grammar.accepts('{"b": 1}')
    assert not grammar.accepts('{"a": 1}') and not grammar.accepts('{"b": "x"}')


def test_names_are_not_spelled_out_in_the_pattern_of_other_keys() -> None:
    """A pattern with all names would take a millisecond per mask, and fail with long names."""
    names = {f"{'long' * 30}{number}": A for number in range(100)}
    text = Grammar({"type": "object", "properties": names}).text
    (pattern,) = json.loads(text)["patternProperties"]
    assert pattern == "^(?:(?s:.)*)$"
    assert Grammar({"type": "object", "properties": names}).accepts('{"longlong": 1}')


@pytest.mark.parametrize("text", ["é", "中文", "😀", "\x01", "a\x7f"])
def test_json_dumps_in_ascii_is_accepted(text: str) -> None:
    value = {"a": text, "other": [text]}
    grammar = Grammar({"type": "object", "properties": {"a": {"type": "string", "maxLength": 2}}})
    assert grammar.accepts(json.dumps(value)) and not grammar.accepts(json.dumps({"a": text * 3}))
    assert not grammar.accepts('{"a": "\\ud83d"}')
