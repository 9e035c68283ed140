"""Test the order of keys: objects with optional properties allow any order, except small objects."""

import json
import random
from itertools import permutations

import jsonschema
import pytest

from mmengine.structured_output.json_schema.normalization import Bounds, normalize_schema
from mmengine.structured_output.report.report import check_schema
from mmengine.structured_output.request.spec import grammar_of, notes_of
from tests.structured.accepting import UNBOUND, Grammar, byte_backend

ANY = Bounds.off()
NULL = {"type": "null"}
NAMES = ["a", "ab", "", 'q"\\', "é\n", "z"]
REST = [False, True, {"type": "integer"}]


def nulls(*names: str) -> dict:
    return {"type": "object", "properties": dict.fromkeys(names, NULL)}


def said(*names: str) -> str:
    return json.dumps(dict.fromkeys(names))


@pytest.mark.parametrize("rest", REST)
def test_any_order_of_valid_keys_is_accepted(rest: dict | bool) -> None:
    source = random.Random(str(rest))
    kinds = [NULL, {"type": "integer"}, {"enum": ["x", 1]}, {}]
    for _ in range(8):
        names = source.sample(NAMES, source.randint(1, 6))
        schema = {"type": "object", "properties": {name: source.choice(kinds) for name in names}}
        schema |= {"required": source.sample(NAMES, source.randint(0, 2)), "additionalProperties": rest}
        referee = jsonschema.Draft202012Validator(schema)
        try:
            grammar = Grammar(schema, ANY)
        except Exception as error:
            assert not rest and "required but not allowed" in str(error), schema
            continue
        for _ in range(25):
            keys = source.sample([*NAMES, "other", "abc"], source.randint(0, 7))
            value = {key: source.choice([None, 1, "x"]) for key in keys}
            assert grammar.accepts(json.dumps(value, ensure_ascii=False)) == referee.is_valid(value), (
                schema,
                value,
            )


@pytest.mark.parametrize("bounds", [UNBOUND, Bounds()])
def test_a_skipped_property_may_follow_later(bounds: Bounds) -> None:
    schema = nulls("a", "b", "c", "d", "e") | {"required": ["d"]}
    for closed in ({}, {"additionalProperties": False}):
        grammar = Grammar(schema | closed, bounds)
        assert all(grammar.accepts(said(*names)) for names in permutations("abd"))
        assert not grammar.accepts(said("a", "b")), "d must come"
        assert not grammar.accepts('{"d":null,"a":null,"a":null}'), "once each"
        assert not grammar.accepts('{"d":null,}') and not grammar.accepts('{"d":1}')
        assert grammar.accepts(said("x", "d", "y", "a", "z")) == (not closed)


@pytest.mark.parametrize(
    "schema",
    [nulls("a", "b", "c", "d"), nulls(*"abcdef") | {"required": list("abcdef")}],
    ids=["small", "all must come"],
)
def test_small_objects_keep_their_order_by_default(schema: dict) -> None:
    names = list(schema["properties"])
    assert Grammar(schema).accepts(said(*names)) and not Grammar(schema).accepts(said(*names[::-1]))
    assert Grammar(schema, ANY).accepts(said(*names[::-1]))
    (note,) = check_schema(schema, bounds=UNBOUND).bounds
    assert (note.keyword, note.pointer) == ("properties", "#") and "only in the schema's order" in note.text
    assert not check_schema(schema, bounds=ANY).bounds


def test_the_schemas_order_can_be_kept() -> None:
    schema = nulls(*"abcdef")
    for many in (6, 1_000):
        grammar = Grammar(schema, Bounds(ordered=many))
        assert grammar.accepts(said("a", "b")) and not grammar.accepts(said("b", "a"))
    assert "%json" not in normalize_schema(schema, Bounds(ordered=6)).text


@pytest.mark.parametrize("groups", [2, 5])
def test_keys_of_the_base_and_of_branches_are_mixed(groups: int) -> None:
    """If several schemas apply to an object, its keys may come in any order."""
    ends = ["", "'", "''"]
    parts = [nulls(*(f"{at}{end}" for end in ends)) | {"required": [f"{at}"]} for at in range(groups)]
    must = {"required": [f"{at}{end}" for end in ends[1:] for at in range(groups)]}
    if groups == 2:
        must["required"].pop()
    schema = {"type": "object", "allOf": parts[1:], "anyOf": [must, {"required": ["x"]}], **parts[0]}
    names = [f"{at}{end}" for end in ends for at in range(groups)]
    orders = [names, names[::-1], names[1:] + names[:1]]
    assert all(Grammar(schema).accepts(said(*order)) for order in orders)
    assert not Grammar(schema).accepts(said(*names[1:]))


TOO_MANY = nulls(*(f"n{at}" for at in range(64)))
COUNTED = nulls(*"abcdef") | {"minProperties": 2, "additionalProperties": False}
CONTROLS = nulls("", "\x01", "\\", '"', "\\\\") | {"additionalProperties": {"type": "integer"}}


@pytest.mark.parametrize(
    ("schema", "keyword", "says"),
    [
        (TOO_MANY, "properties", "keys only in this order, other keys after them: n0, n1, n2"),
        (COUNTED, "properties", "minProperties and maxProperties count them"),
        (CONTROLS, "patternProperties", "U+0000"),
    ],
    ids=["too many", "counted", "controls"],
)
def test_orders_that_no_setting_allows_are_noted(schema: dict, keyword: str, says: str) -> None:
    within = {"type": "object", "properties": {"part": schema, "others": nulls(*"abcdefg")}}
    report = check_schema(within, bounds=ANY)
    assert report.verdict == "approximated"
    (note,) = report.approximations
    assert note.keyword == keyword and note.pointer.startswith("#/properties/part") and says in note.text
    asked = {"type": "json_schema", "json_schema": {"schema": within}}
    assert note.text in [each.text for each in notes_of(asked)]
    assert Grammar(schema, ANY).accepts(said(*list(schema["properties"])[:3]))


def test_the_maximum_number_of_unordered_properties() -> None:
    names = [f"n{at}" for at in range(63)]
    grammar = Grammar(nulls(*names) | {"required": names[5:20]})
    assert grammar.accepts(said(*names[::-1])) and not grammar.accepts(said(*names[6:]))


def test_a_completion_contains_only_required_keys() -> None:
    schema = nulls(*(f"a property {at}" for at in range(40))) | {
        "required": ["a property 30", "a property 3"]
    }
    asked = {"type": "json_schema", "json_schema": {"schema": schema}, "on_truncation": "close"}
    compiled = byte_backend().compile(grammar_of(asked))
    shortest = len('{"a property 30":null,"a property 3":null}')
    assert compiled.shortest == shortest


def test_a_name_that_lark_cannot_spell() -> None:
    """The object is written in Lark, because its array has `contains`."""
    schema = nulls("\x7f", 'a"') | {"additionalProperties": False}
    schema["properties"]["some"] = {"type": "array", "contains": NULL, "items": {"type": ["null", "boolean"]}}
    assert Grammar(schema).accepts('{"\x7f":null,"some":[true,null]}')
