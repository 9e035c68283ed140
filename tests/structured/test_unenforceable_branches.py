"""Tests anyOf with a branch that cannot be enforced. pydantic writes such an anyOf for Decimal."""

import json
import random
from typing import Any

import jsonschema
import pytest

from mmengine.structured_output.json_schema.normalization import SchemaRefused
from mmengine.structured_output.report.report import check_schema
from tests.structured.accepting import Grammar

LOOKAHEAD = {"type": "string", "pattern": "^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$"}
DECIMAL = {"anyOf": [{"type": "number"}, LOOKAHEAD]}


def test_the_branch_is_left_out_and_named():
    grammar = Grammar({"type": "object", "properties": {"a": DECIMAL}, "required": ["a"]})
    assert grammar.accepts('{"a":1.5}') and not grammar.accepts('{"a":"1.5"}')
    (note,) = grammar.narrow
    assert note.pointer == "#/properties/a/anyOf" and "#/properties/a/anyOf/1/pattern" in note.text
    assert check_schema({"properties": {"a": DECIMAL}}).verdict == "approximated"


@pytest.mark.parametrize("pattern", ["(?=a)b", "(?<!a)b", r"\\bword", r"(a)\\1"])
def test_other_patterns_that_cannot_be_enforced(pattern):
    assert Grammar({"anyOf": [{"type": "string", "pattern": pattern}, {"type": "null"}]}).accepts("null")


@pytest.mark.parametrize(
    "schema",
    [
        LOOKAHEAD,
        {"anyOf": [LOOKAHEAD]},
        {"anyOf": [LOOKAHEAD, LOOKAHEAD]},
        {"anyOf": [{"type": "number"}, {"type": "string", "pattern": "a)"}]},
    ],
)
def test_without_a_branch_that_can_be_enforced_the_schema_is_refused(schema):
    with pytest.raises(SchemaRefused, match="pattern"):
        Grammar(schema)


def model(kind: str, **properties: Any) -> dict[str, Any]:
    """Return the schema of a model in a tagged union."""
    names = {"kind": {"const": kind}, **properties}
    return {"type": "object", "properties": names, "required": [*names], "additionalProperties": False}


TEXTS = [
    *("0", "1", "1.5", "null", '"1"', '"a"', '"abcd"', "{}", "[]", "[1]", '["1"]'),
    *('{"kind":"a","x":"1"}', '{"kind":"a","x":1}', '{"kind":"b","x":1}', '{"x":1}', '{"x":"1"}'),
    *('{"v":1}', '{"v":"1"}', '{"v":1,"next":{"v":2}}', '{"v":1,"next":{"v":"2"}}', '{"v":1,"next":null}'),
]
NODE = {"type": "object", "properties": {"v": DECIMAL, "next": {"$ref": "#/$defs/n"}}, "required": ["v"]}
LEFT_OUT: dict[str, tuple[dict[str, Any], list[str]]] = {
    "behind $ref": (
        {
            "$defs": {"d": {"$ref": "#/$defs/e"}, "e": LOOKAHEAD},
            "anyOf": [{"type": "number"}, {"$ref": "#/$defs/d"}],
        },
        ["0", "1", "1.5"],
    ),
    "in a property": ({"anyOf": [model("a", x=LOOKAHEAD), model("b", x={"type": "integer"})]}, [TEXTS[13]]),
    "in an optional property": (
        {"anyOf": [{"type": "object", "properties": {"x": LOOKAHEAD}}, {"type": "null"}]},
        ["null"],
    ),
    "in items": (
        {"anyOf": [{"type": "array", "items": LOOKAHEAD}, {"type": "array", "items": {"type": "integer"}}]},
        ["[]", "[1]"],
    ),
    "in allOf": ({"anyOf": [{"allOf": [{"type": "string"}, LOOKAHEAD]}, {"type": "null"}]}, ["null"]),
    "in a key pattern": (
        {"anyOf": [{"type": "object", "patternProperties": {"^(?=x)": True}}, {"type": "null"}]},
        ["null"],
    ),
    "in not": ({"anyOf": [{"type": "string", "not": LOOKAHEAD}, {"type": "null"}]}, ["null"]),
    "an inner anyOf has a branch": (
        {"anyOf": [model("a", x=DECIMAL), {"type": "null"}]},
        ["null", '{"kind":"a","x":1}'],
    ),
    "recursive": (
        {"$defs": {"n": {"anyOf": [NODE, {"type": "null"}]}}, "$ref": "#/$defs/n"},
        ["null", '{"v":1}', '{"v":1,"next":{"v":2}}', '{"v":1,"next":null}'],
    ),
    "oneOf": ({"oneOf": [{"type": "number"}, LOOKAHEAD]}, ["0", "1", "1.5"]),
    "oneOf, the branches overlap": ({"oneOf": [{"type": ["string", "null"]}, LOOKAHEAD]}, ["null"]),
    "oneOf, models": ({"oneOf": [model("a", x=LOOKAHEAD), model("b", x={"type": "integer"})]}, [TEXTS[13]]),
    "oneOf, a branch is narrowed": ({"oneOf": [DECIMAL, {"type": "null"}]}, ["0", "1", "1.5", "null"]),
    "oneOf, a narrowed branch overlaps": ({"oneOf": [DECIMAL, {"type": "string"}]}, ["0", "1", "1.5"]),
    "oneOf behind $ref": (
        {"$defs": {"d": LOOKAHEAD}, "oneOf": [{"type": "boolean"}, {"$ref": "#/$defs/d"}, {"type": "null"}]},
        ["null"],
    ),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_only_branches_that_cannot_be_enforced_are_left_out(name: str) -> None:
    schema, accepted = LEFT_OUT[name]
    grammar = Grammar(schema)
    found = [text for text in TEXTS if grammar.accepts(text)]
    assert found == [text for text in TEXTS if text in accepted] and grammar.narrow
    validator = jsonschema.Draft202012Validator(schema)
    assert all(validator.is_valid(json.loads(text)) for text in found)


def test_random_texts_of_narrowed_schemas_are_valid() -> None:
    source = random.Random(11)
    for schema, _ in LEFT_OUT.values():
        grammar, validator = Grammar(schema), jsonschema.Draft202012Validator(schema)
        texts = [grammar.walk(source, 120) for _ in range(12)]
        for text in filter(None, texts):
            assert validator.is_valid(json.loads(text)), (schema, text)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"x": LOOKAHEAD}},
        {"type": "object", "dependentSchemas": {"a": {"properties": {"b": LOOKAHEAD}}}},
        {"oneOf": [{"type": "string", "maxLength": 3}, LOOKAHEAD]},
        {"anyOf": [model("a", x=LOOKAHEAD), model("b", x={"oneOf": [LOOKAHEAD]})]},
    ],
)
def test_nothing_else_is_left_out(schema: dict[str, Any]) -> None:
    # A schema is refused if its lookahead cannot be removed by leaving out branches of an anyOf or oneOf.
    with pytest.raises(SchemaRefused, match=r"pattern|not|lookahead"):
        Grammar(schema)


def test_a_large_recursive_schema_is_searched_once() -> None:
    """A search for each anyOf would take quadratic time, because each anyOf reaches all models."""
    names = [f"m{number}" for number in range(400)]
    definitions = {
        name: model(name, x={"anyOf": [{"$ref": f"#/$defs/{names[n * 7 % 400]}"}, DECIMAL, {"type": "null"}]})
        for n, name in enumerate(names)
    }
    grammar = Grammar({"$defs": definitions, "$ref": "#/$defs/m3"})
    assert grammar.accepts('{"kind":"m3","x":{"kind":"m21","x":1}}')


def test_a_narrowed_anyof_is_not_negated():
    """The grammar leaves out a DECIMAL branch, whose values the `not` must still refuse."""
    with pytest.raises(SchemaRefused, match="more narrowly"):
        Grammar({"type": "string", "not": DECIMAL})
    with pytest.raises(SchemaRefused, match="more narrowly"):
        Grammar({"properties": {"a": {"type": "string"}}, "not": {"properties": {"a": DECIMAL}}})
