"""Test that each refusal of a schema names the keyword and its JSON pointer."""

import json

import pytest

from mmengine.errors import InvalidRequest
from mmengine.structured_output.json_schema.normalization import SchemaRefused, normalize_schema
from tests.structured.accepting import Grammar

ENDLESS = {"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]}
P = "\\p{L}"  # With this key pattern, overlapping key patterns cannot be separated.
CASES = [
    # schema, keyword, pointer
    ({"type": "number", "not": {"multipleOf": 3}}, "not", "#/not"),
    ({"type": "string", "not": {"format": "email"}}, "not", "#/not"),
    ({"type": "string", "not": {"pattern": "a.{20}b"}}, "not", "#/not"),
    ({"type": "object", "not": {"additionalProperties": {"type": "null"}}}, "not", "#/not"),
    ({"if": {"format": "email"}, "then": {"type": "null"}}, "if", "#/if"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems", "#/uniqueItems"),
    ({"type": "array", "contains": {"const": 1}, "minContains": 5_000}, "contains", "#/contains"),
    (
        {"type": "object", "propertyNames": {"pattern": "^\\p{L}", "maxLength": 3}},
        "propertyNames",
        "#/propertyNames",
    ),
    (
        {"unevaluatedProperties": False, "anyOf": [{"properties": {str(at): True}} for at in range(9)]},
        "anyOf",
        "#/anyOf",
    ),
    ({"anyOf": [True], "items": {"$ref": "#/anyOf/" + "1" * 5_000}}, "$ref", "#/items/$ref"),
    ({"properties": {"a/b": {"$dynamicRef": "#x"}}}, "$dynamicRef", "#/properties/a~1b/$dynamicRef"),
    ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, "oneOf", "#/oneOf"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf", "#/oneOf"),
    ({"oneOf": [{"required": [f"k{at}"]} for at in range(600)]}, "oneOf", "#/oneOf"),
    ({"type": "object", "minProperties": 2}, "minProperties", "#/minProperties"),
    ({"type": "string", "pattern": "(?=a)b"}, "pattern", "#/pattern"),
    ({"type": "string", "pattern": "^(a{1,50}){50}$"}, "pattern", "#/pattern"),
    ({"type": "string", "pattern": "(a{900}){900}"}, "pattern", "#/pattern"),
    ({"type": "string", "pattern": "a" * 5_000}, "pattern", "#/pattern"),
    ({"type": "string", "pattern": "(" * 50 + ")" * 50}, "pattern", "#/pattern"),
    ({"type": "string", "pattern": '^([^"]|\\x00)$'}, "pattern", "#/pattern"),
    ({"type": "string", "pattern": "^x\\u0000|x[^\\\\]$"}, "pattern", "#/pattern"),
    ({"type": "string", "pattern": "^([\\0-\\x0f]|[\\x10-\\x1f])$"}, "pattern", "#/pattern"),
    ({"type": "string", "pattern": "^([\\p{L}\\x01-\\x1f]|\\0)$"}, "pattern", "#/pattern"),
    ({"patternProperties": {"a(": True}}, "patternProperties", "#/patternProperties/a("),
    (
        {
            "properties": {
                "b": {"patternProperties": {"^a": {"type": "null"}, "^a/b": {"type": "string"}, P: False}}
            }
        },
        "patternProperties",
        "#/properties/b/patternProperties/^a~1b",
    ),
    (
        {
            "type": "object",
            "patternProperties": {"^ab": False, "^a": True, P: True},
            "additionalProperties": False,
        },
        "patternProperties",
        "#/patternProperties/^ab",
    ),
    (
        {
            "patternProperties": {"^x": True, P: False},
            "allOf": [{"patternProperties": {"^xy": {"type": "null"}}}],
        },
        "patternProperties",
        "#/allOf/0/patternProperties/^xy",
    ),
    ({"type": "number", "minimum": 3, "maximum": 2}, "minimum", "#/minimum"),
    ({"type": "integer", "exclusiveMinimum": 3, "maximum": 3}, "exclusiveMinimum", "#/exclusiveMinimum"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength", "#/minLength"),
    (
        {
            "type": "object",
            "properties": {"a": {"type": "array", "minItems": 2, "maxItems": 1}},
            "required": ["a"],
        },
        "minItems",
        "#/properties/a/minItems",
    ),
    ({"enum": []}, "enum", "#/enum"),
    ({"enum": list(range(30_000))}, "enum", "#/enum"),
    ({"type": "object", "properties": {"a": False}, "required": ["b", "a"]}, "required", "#/required/1"),
    ({"type": "object", "required": ["a"], "additionalProperties": False}, "required", "#/required"),
    (False, "", "#"),
    ({"allOf": [{"type": "string"}, {"type": "null"}]}, "", "#"),
    (ENDLESS, "$ref", "#"),
    ({"$ref": "#"}, "$ref", "#"),
    ({"allOf": [{"$ref": "#"}]}, "$ref", "#"),
    ({"type": "string", "oneOf": [{"minLength": 2}, {"$ref": "#"}]}, "", "#/oneOf/1"),
    ({"not": {"$ref": "#"}}, "", "#/not"),
    ({"const": {"a": 1}, "patternProperties": {"^\\p{L}$": True}}, "patternProperties", "#"),
    ({"allOf": [{"anyOf": [{"minLength": at}, {"maxLength": 40}]} for at in range(30)]}, "anyOf", "#"),
    (
        {"type": "string", "allOf": [{"anyOf": [{"const": str(a)}, {"minLength": 1}]} for a in range(1_500)]},
        "",
        "#",
    ),
    ({"$ref": "#/$defs/missing"}, "$ref", "#/$ref"),
    ({"$ref": "https://example.org/other"}, "$ref", "#/$ref"),
    ({"type": "integer", "minimum": 2**60}, "minimum", "#/minimum"),
    ({"const": 2**53 + 1}, "const", "#/const"),
    ({"multipleOf": 0.07}, "multipleOf", "#/multipleOf"),
    (
        {"allOf": [{"multipleOf": 65536}, {"multipleOf": 65537}, {"multipleOf": 3}]},
        "multipleOf",
        "#/multipleOf",
    ),
    ({"multipleOf": 0}, "multipleOf", "#/multipleOf"),
    ({"type": "text"}, "type", "#/type"),
    ({"type": []}, "type", "#/type"),
    ({"properties": []}, "properties", "#/properties"),
    ({"$schema": "https://json-schema.org/draft/2020-12/schema", "items": [True]}, "items", "#/items"),
    ({"required": ["a", 1]}, "required", "#/required"),
    ({"minLength": -1}, "minLength", "#/minLength"),
    ({"minLength": True}, "minLength", "#/minLength"),
    ({"minItems": 10**9}, "minItems", "#/minItems"),
    ({"anyOf": []}, "anyOf", "#/anyOf"),
    (3, "", "#"),
    ({"allOf": [{"anyOf": [{"type": t} for t in ("null", "string")] * 40}] * 3}, "anyOf", "#"),
]


@pytest.mark.parametrize(("schema", "keyword", "pointer"), CASES)
def test_refused(schema: object, keyword: str, pointer: str) -> None:
    with pytest.raises(SchemaRefused) as caught:
        normalize_schema(schema)
    assert (caught.value.keyword, caught.value.pointer) == (keyword, pointer)
    assert isinstance(caught.value, InvalidRequest)
    assert pointer in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "nul", "NaN", '{"a":1,"a":2}', '{"const":1e999}', b'"\xff"', '{"const":"\\ud800"}'),
        *(
            "[" * 100_000,
            '{"items":' * 500 + "{}" + "}" * 500,
            '{"const":' + "9" * 5_000 + "}",
            " " * 3_000_000,
        ),
    ],
)
def test_texts_that_are_not_schemas(text: str | bytes) -> None:
    with pytest.raises(SchemaRefused):
        normalize_schema(text)


def test_a_dict_that_is_not_json() -> None:
    endless: dict = {}
    endless["items"] = endless
    for schema in (endless, {"const": float("nan")}, {"const": object()}, {"const": "\ud800"}):
        with pytest.raises(SchemaRefused):
            normalize_schema(schema)


def test_an_irrelevant_unsupported_keyword_is_accepted() -> None:
    assert normalize_schema(
        {"type": "object", "uniqueItems": True, "$defs": {"unused": {"not": {"const": 1}}}}
    )


@pytest.mark.timeout(30)
def test_wide_and_deep_schemas_within_the_limits() -> None:
    wide = {"type": "object", "properties": {f"p{at}": {"type": "string"} for at in range(2_000)}}
    assert len(json.loads(normalize_schema(wide).text)["properties"]) == 2_000
    needed = {"type": "object", "required": [f"r{at}" for at in range(50_000)]}
    assert len(json.loads(normalize_schema(needed).text)["required"]) == 50_000
    deep: dict = {"type": "null"}
    for _ in range(60):
        deep = {"type": "array", "items": deep}
    assert normalize_schema(deep)


def test_a_long_chain_of_references() -> None:
    chain = {f"d{at}": {"type": "array", "items": {"$ref": f"#/$defs/d{at + 1}"}} for at in range(100)}
    grammar = Grammar({"$ref": "#/$defs/d0", "$defs": {**chain, "d100": {"type": "null"}}})
    assert grammar.accepts("[" * 100 + "null" + "]" * 100) and not grammar.accepts(
        "[" * 99 + "null" + "]" * 99
    )


@pytest.mark.timeout(30)
def test_a_reference_with_a_million_names_is_refused():
    with pytest.raises(SchemaRefused, match="leads to no schema"):
        normalize_schema({"items": {"$ref": "#" + "/" * 1_000_000}})
