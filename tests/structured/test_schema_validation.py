"""Tests the validation of answers to schemas that could not be enforced."""

import json

import pytest

from mmengine.structured_output.json_schema import validation
from mmengine.structured_output.json_schema.validation import TOO_LARGE, find_violation

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
