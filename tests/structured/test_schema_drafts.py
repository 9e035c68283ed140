"""Tests schemas in older drafts of JSON Schema: grammars accept the same values as the draft's validator."""

import json

import jsonschema
import pytest

from mmengine.structured_output.json_schema.normalization import SchemaRefused, normalize_schema
from tests.structured.accepting import Grammar

D: dict[object, str] = {at: f"http://json-schema.org/draft-0{at}/schema#" for at in (3, 4, 6, 7)}
D |= {at: f"https://json-schema.org/draft/{at}/schema" for at in ("2019-09", "2020-12")}
NAMED = {"$ref": "#/definitions/n", "minimum": 9, "definitions": {"n": {"type": "integer", "minimum": 3}}}
BASE = "http://example.org/base/"
SIBLING_ID = {
    "$id": BASE,
    "definitions": {
        "foo": {"$id": "http://example.org/foo.json", "type": "string"},
        "base": {"$id": "foo.json", "type": "number"},
    },
    "allOf": [{"$id": "http://example.org/", "$ref": "foo.json"}],
}
INSIDE = {
    "properties": {"a": {"$ref": "x.json#/definitions/y"}, "b": {"$ref": "#named"}},
    "definitions": {
        "x": {"ID": "x.json", "definitions": {"y": {"type": "null"}}},
        "n": {"ID": "#named", "enum": [1]},
    },
}
TREE = {
    "$id": "http://example.org/tree",
    "$recursiveAnchor": True,
    "type": "object",
    "properties": {"v": {"type": "integer"}, "n": {"$recursiveRef": "#"}},
    "additionalProperties": False,
}
DEPENDENT = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}, "c": {"type": "integer"}},
    "additionalProperties": False,
    "dependencies": {"a": ["b"], "b": {"properties": {"c": {"maximum": 3}}}},
}
PAIR = {"type": "array", "items": [{"type": "integer"}, {"type": "null"}]}
ARRAYS = [[], [1], [1, None], [1, None, "x"], [1, None, 7], [1, 2], ["x"]]
CASES = [
    # draft, schema, instances
    *((at, {**PAIR, "additionalItems": False}, ARRAYS) for at in (3, 4, 6, 7, "2019-09")),
    *((at, {**PAIR, "additionalItems": {"type": "string"}}, ARRAYS) for at in (4, 7, "2019-09")),
    (7, {"type": "array", "items": [], "additionalItems": {"type": "null"}}, ARRAYS),
    (4, {"type": "array", "items": {"type": "integer"}, "additionalItems": False}, [[], [1, 2], ["x"]]),
    *(
        (at, DEPENDENT, [{}, {"a": 1}, {"a": 1, "b": 2}, {"b": 1, "c": 4}, {"b": 1, "c": 3}, {"c": 9}])
        for at in (4, 6, 7)
    ),
    (3, {"type": "object", "dependencies": {"a": "b"}}, [{}, {"a": 1}, {"a": 1, "b": 1}, {"b": 1}]),
    *(
        (
            at,
            {
                "type": "integer",
                "minimum": 3,
                "exclusiveMinimum": flag,
                "maximum": 6,
                "exclusiveMaximum": True,
            },
            range(2, 8),
        )
        for at in (3, 4)
        for flag in (True, False)
    ),
    (4, {"type": "integer", "exclusiveMinimum": True}, [-1, 0, 1]),
    (6, {"type": "integer", "exclusiveMinimum": 3}, [3, 4]),
    *((at, NAMED, [2, 3, 9]) for at in (4, 6, 7, "2019-09", "2020-12")),
    *((at, SIBLING_ID, ["x", 1]) for at in (6, 7)),
    (4, json.loads(json.dumps(INSIDE).replace("ID", "id")), [{"a": None}, {"a": 1}, {"b": 1}, {"b": 2}]),
    (7, json.loads(json.dumps(INSIDE).replace("ID", "$id")), [{"a": None}, {"a": 1}, {"b": 1}, {"b": 2}]),
    (4, {"const": 1, "type": "integer"}, [1, 2]),
    (4, {"type": "array", "contains": {"type": "null"}}, [[], [None]]),
    (6, {"if": {"type": "integer"}, "then": {"minimum": 3}, "type": "integer"}, [1, 5]),
    (7, {"type": "object", "dependentRequired": {"a": ["b"]}}, [{"a": 1}]),
    (7, {"type": "array", "prefixItems": [{"type": "null"}]}, [[None], [1]]),
    (
        7,
        {
            "properties": {"a": {"$anchor": "x"}, "b": {"$ref": "#/foo/bar/0"}},
            "foo": {"bar": [{"type": "null"}]},
        },
        [{"b": None}, {"b": 1}],
    ),
    ("2019-09", TREE, [{}, {"v": 1, "n": {"v": 2}}, {"n": {"v": "x"}}, {"n": 1}]),
    ("2019-09", {**TREE, "$recursiveAnchor": False}, [{"v": 1, "n": {"v": 2}}, {"n": {"v": "x"}}]),
    (
        3,
        {"type": "object", "properties": {"a": {"type": "any", "required": True}, "b": {}}},
        [{}, {"a": 1}, {"b": 1}],
    ),
    (3, {"type": "integer", "divisibleBy": 3, "extends": {"minimum": 5}}, [3, 6, 7, 9]),
    (3, {"disallow": ["string", "null"]}, [1, "x", None, {}]),
]


@pytest.mark.parametrize(("draft", "schema", "instances"), CASES)
def test_a_draft_means_the_same_as_its_validator(draft: object, schema: dict, instances: list) -> None:
    schema = {"$schema": D[draft], **schema}
    referee = jsonschema.validators.validator_for(schema)(schema)
    grammar = Grammar(schema)
    for instance in instances:
        assert grammar.accepts(json.dumps(instance)) == referee.is_valid(instance), (instance, grammar.text)


@pytest.mark.parametrize(
    ("schema", "accepted", "refused"),
    [
        (
            {"type": "array", "items": [{"type": "integer"}], "additionalItems": False},
            ["[1]"],
            ["[1,2]", '["x"]'],
        ),
        ({"type": "object", "dependencies": {"a": ["b"]}}, ["{}", '{"a":1,"b":1}'], ['{"a":1}']),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, ["4"], ["3"]),
        (
            {
                "$ref": "http://e.org/s#/definitions/n",
                "id": "http://e.org/s",
                "definitions": {"n": {"type": "null"}},
            },
            ["null"],
            ["1"],
        ),
        ({"$ref": "#n", "$defs": {"x": {"id": "#n", "type": "null"}}}, ["null"], ["1"]),
        ({"type": "string", "nullable": True, "maxLength": 1}, ["null", '"x"'], ['"xy"', "1"]),
        ({"type": "string", "nullable": True, "enum": ["a"]}, ['"a"'], ["null"]),
        ({"type": "string", "nullable": False}, ['"a"'], ["null"]),
        ({"nullable": True, "enum": ["a"]}, ['"a"'], ["null"]),
    ],
)
def test_older_keywords_are_accepted_without_a_draft(
    schema: dict, accepted: list[str], refused: list[str]
) -> None:
    grammar = Grammar(schema)
    assert [text for text in accepted if not grammar.accepts(text)] == [], grammar.text
    assert [text for text in refused if grammar.accepts(text)] == [], grammar.text


def test_nullable_is_only_openapis() -> None:
    schema = {"$schema": D[7], "type": "string", "nullable": True}
    assert not Grammar(schema).accepts("null")
    assert [(note.keyword, note.warning) for note in normalize_schema(schema).notes] == [("nullable", True)]


DYNAMIC = {
    "$schema": D["2020-12"],
    "$id": "http://example.org/root",
    "$ref": "list",
    "$defs": {
        "items": {"$dynamicAnchor": "T", "type": "string"},
        "list": {
            "$id": "list",
            "type": "array",
            "items": {"$dynamicRef": "#T"},
            "$defs": {"items": {"$dynamicAnchor": "T", "type": "integer"}},
        },
    },
}


def test_a_dynamic_reference_with_one_target() -> None:
    grammar = Grammar(DYNAMIC)
    assert grammar.accepts('["x"]') and not grammar.accepts("[1]")
    alone = json.loads(json.dumps(DYNAMIC))
    del alone["$defs"]["items"]
    grammar = Grammar(alone)
    assert grammar.accepts("[1]") and not grammar.accepts('["x"]')


def test_a_dynamic_reference_that_depends_on_the_path_is_refused() -> None:
    schema = json.loads(json.dumps(DYNAMIC))
    # The resource "elsewhere" is never on the path to the reference.
    schema["$defs"]["items"]["$id"] = "elsewhere"
    grammar = Grammar(schema)
    assert grammar.accepts("[1]") and not grammar.accepts('["x"]')
    strings = {"$dynamicAnchor": "T", "type": "string"}
    schema["$defs"]["strings"] = {"$id": "strings", "$ref": "list", "$defs": {"items": strings}}
    schema["$ref"] = "strings"
    grammar = Grammar(schema)
    assert grammar.accepts('["x"]') and not grammar.accepts("[1]")
    schema["properties"] = {"a": {"$ref": "list"}}
    with pytest.raises(SchemaRefused, match="depends on the evaluation path") as caught:
        normalize_schema(schema)
    assert caught.value.pointer == "#/$defs/list/items/$dynamicRef"


STORE = {
    "http://example.org/a": {"$ref": "b#/$defs/n", "$defs": {"unused": {"$ref": "http://elsewhere.org"}}},
    "http://example.org/b": {
        "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/m"}}, "m": {"const": 7}}
    },
    "http://example.org/never": {"type": "nothing that is known"},
}


def test_a_store_of_documents() -> None:
    """References lead into the documents in `schemas`. Parts that no reference reaches are not checked."""
    schema = {"$ref": "http://example.org/a"}
    grammar = Grammar(normalize_schema(schema, schemas=STORE).text)
    with pytest.raises(SchemaRefused, match="outside this schema"):
        normalize_schema(schema)
    text = normalize_schema(schema, schemas=STORE).text
    assert '"enum":[7]' in text and "elsewhere" not in text
    assert grammar.accepts("[]") and grammar.accepts("[7,7]") and not grammar.accepts("[8]")
    with pytest.raises(SchemaRefused) as caught:
        normalize_schema({"$ref": "http://example.org/b#/$defs/none"}, schemas=STORE)
    assert caught.value.pointer == "#/$ref"
    with pytest.raises(SchemaRefused) as caught:
        normalize_schema(
            {"$ref": "http://example.org/c"}, schemas={"http://example.org/c": {"items": {"type": "x"}}}
        )
    assert caught.value.pointer == "http://example.org/c#/items/type"


def test_a_store_is_bounded() -> None:
    big = {f"http://example.org/{at}": {"description": "x" * 600_000} for at in range(4)}
    with pytest.raises(SchemaRefused, match="schemas have more than"):
        normalize_schema({"type": "null"}, schemas=big)


def test_a_fault_where_only_a_reference_leads() -> None:
    # A definition's fault is an error only if a reference leads to the definition.
    schema = {"type": "null", "$defs": {"a": {"properties": {"b": {"type": "x"}}}}, "foo": {"bar": 3}}
    assert Grammar(schema).accepts("null")
    for reference, pointer in (
        ("a", "#/$defs/a/properties/b/type"),
        ("a/properties/b", "#/$defs/a/properties/b/type"),
    ):
        with pytest.raises(SchemaRefused) as caught:
            normalize_schema({**schema, "$ref": f"#/$defs/{reference}"})
        assert caught.value.pointer == pointer
    with pytest.raises(SchemaRefused, match="leads to no schema"):
        normalize_schema({**schema, "$ref": "#/foo/bar"})


def test_an_ambiguous_identifier_is_refused_where_referenced() -> None:
    twice = {"$defs": {"a": {"$anchor": "n", "type": "null"}, "b": {"$anchor": "n", "type": "string"}}}
    assert Grammar({**twice, "type": "null"}).accepts("null")
    with pytest.raises(SchemaRefused, match="two different schemas"):
        normalize_schema({**twice, "$ref": "#n"})
    for at in ("a", "b"):
        twice["$defs"][at] = {"$id": "n", "type": "null"}
    assert Grammar({**twice, "$ref": "n"}).accepts("null")
    twice["$defs"]["b"]["type"] = "string"
    with pytest.raises(SchemaRefused, match="two different schemas"):
        normalize_schema({**twice, "$ref": "n#/type"})


@pytest.mark.timeout(30)
def test_faults_and_references_are_read_once() -> None:
    broken = {f"d{at}": {"items": {"items": {"type": "x"}}} for at in range(6_000)}
    references = {f"p{at}": {"$ref": f"#/$defs/d{at}/items/items"} for at in range(1_500)}
    assert Grammar({"type": "null", "$defs": {**broken, "all": {"properties": references}}}).accepts("null")


@pytest.mark.parametrize(
    ("schema", "keyword", "pointer"),
    [
        ({"dependencies": []}, "dependencies", "#/dependencies"),
        ({"dependencies": {"a": [1]}}, "dependentRequired", "#/dependentRequired"),
        ({"dependencies": {"a": [[]]}, "dependentRequired": {"a": []}}, "dependencies", "#/dependencies/a"),
        ({"dependencies": {"a": []}, "dependentSchemas": 3}, "dependentSchemas", "#/dependentSchemas"),
        ({"items": [True], "prefixItems": [True]}, "items", "#/items"),
        ({"$schema": D[4], "minimum": 3, "exclusiveMinimum": 5}, "exclusiveMinimum", "#/exclusiveMinimum"),
        ({"$schema": D[7], "minimum": 3, "exclusiveMinimum": True}, "exclusiveMinimum", "#/exclusiveMinimum"),
        ({"$schema": D["2019-09"], "$recursiveRef": "#/x"}, "$recursiveRef", "#/$recursiveRef"),
        (
            {"$schema": D["2019-09"], "contains": {"const": 1}, "unevaluatedItems": False},
            "unevaluatedItems",
            "#/unevaluatedItems",
        ),
        ({"$id": 3}, "$id", "#/$id"),
        ({"$anchor": []}, "$anchor", "#/$anchor"),
        ({"$ref": "http://[x"}, "$ref", "#/$ref"),
        ({"$id": "http://[x", "$ref": "y"}, "$ref", "#/$ref"),
        ({"$schema": D[3], "disallow": {}}, "type", "#/disallow/type"),
    ],
)
def test_invalid_schemas_of_a_draft(schema: dict, keyword: str, pointer: str) -> None:
    with pytest.raises(SchemaRefused) as caught:
        normalize_schema(schema)
    assert (caught.value.keyword, caught.value.pointer) == (keyword, pointer)
