"""Tests how answers are validated against schemas that masks did not enforce."""

import json

import pytest
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from jsonschema.validators import validator_for
from referencing.exceptions import Unresolvable

from mmengine.structured_output.json_schema import validation
from mmengine.structured_output.json_schema.validation import TOO_LARGE, find_violation
from tests.structured.test_draft_random import DRAFTS, Source

NULLS = {"prefixItems": [{"type": "null"}], "$defs": {"a/b%": {"type": "null"}}}


@pytest.mark.parametrize("reference", ["#/prefixItems/0", "#/$defs/a~1b%25"])
def test_references_lead_to_elements_and_escaped_names(reference):
    schema = {**NULLS, "items": {"$ref": reference}}
    assert find_violation(schema, "[null, null]") == ""
    assert find_violation(schema, "[null, 1]") == "type is violated at #/1"


@pytest.mark.parametrize(
    "reference", ["other", "#anchor", "#/prefixItems/00", "#/prefixItems/" + "1" * 5_000, 1]
)
def test_references_that_lead_to_no_schema_allow_all_values(reference):
    assert find_violation({**NULLS, "items": {"$ref": reference}}, "[null, 1]") == ""


@pytest.mark.parametrize(
    "items", [{"enum": list(range(20_000))}, {"type": ["null"] * 20_000}, {"required": ["a"] * 20_000}]
)
def test_long_lists_of_a_schema_are_compared_with_few_values(items):
    value = {"a": 1} if "required" in items else 19_999
    kinds = {**items, "type": [*items["type"], "integer"]} if "type" in items else items
    assert find_violation({"items": kinds}, json.dumps([value] * 4)) == ""
    assert find_violation({"items": kinds}, json.dumps([value] * 1_500)) == TOO_LARGE


def test_a_long_reference_is_followed_once(monkeypatch):
    followed = []
    monkeypatch.setattr(validation, "local_target", lambda root, reference: followed.append(reference))
    reference = "#/" + "a/" * 1_000
    assert find_violation({"items": {"$ref": reference}}, json.dumps([1] * 900)) == ""
    assert followed == [reference]


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ([1, True, "1", [1], {"a": 1}], ""),
        ([1, 1.0], "uniqueItems is violated at #"),
        ([{"a": [1]}, {"a": [1.0]}], "uniqueItems is violated at #"),
    ],
)
def test_unique_items_follow_the_rules_of_json_schema(values, found):
    assert find_violation({"uniqueItems": True}, json.dumps(values)) == found


def test_an_integer_with_many_digits_is_too_large_and_is_json():
    assert find_violation({}, "1" * 5_000) == TOO_LARGE
    assert find_violation({}, "[1") == "it is not JSON"


def test_many_unique_items_are_too_large():
    assert find_violation({"uniqueItems": True}, json.dumps(list(range(400)))) == ""
    assert find_violation({"uniqueItems": True}, json.dumps(list(range(500)))) == TOO_LARGE


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"$schema": DRAFTS[2], "$ref": "#/definitions/a", "minimum": 2, "definitions": {"a": {}}}, "1"),
        ({"$schema": DRAFTS[0], "const": 1}, "2"),
        ({"$schema": DRAFTS[2], "prefixItems": [{"type": "null"}]}, "[1]"),
        ({"properties": {"a": {"type": "string", "nullable": True}}}, '{"a": null}'),
        (
            {
                "$defs": {"b": {"type": "null"}},
                "items": {"$id": "x", "$ref": "#/$defs/b", "$defs": {"b": {}}},
            },
            "[1]",
        ),
    ],
)
def test_keywords_without_an_effect_in_the_draft_are_not_checked(schema, text):
    assert find_violation(schema, text) == ""


@pytest.mark.parametrize("draft", [*DRAFTS, None])
def test_a_violation_is_one_for_the_draft_s_own_validator(draft):
    # For random schemas, jsonschema's validator confirms each violation that find_violation reports.
    source, violations = Source(11), 0
    for _ in range(300):
        schema = source.schema(3) if draft is None else {**source.schema(3), "$schema": draft}
        kind = validator_for(schema, default=Draft202012Validator)
        try:
            kind.check_schema(schema)
        except SchemaError:
            continue
        for value in (source.value(2) for _ in range(5)):
            if find_violation(schema, json.dumps(value)):
                try:
                    assert not kind(schema).is_valid(value), (schema, value)
                except (Unresolvable, RecursionError):  # A reference leads nowhere, or in a circle.
                    continue
                violations += 1
    assert violations > 100
