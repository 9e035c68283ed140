"""Tests of anyOf with a branch that cannot be enforced, as pydantic writes for Decimal."""

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
        {"oneOf": [{"type": "number"}, LOOKAHEAD]},
        {"anyOf": [{"type": "number"}, {"type": "string", "pattern": "a)"}]},
    ],
)
def test_without_a_branch_that_can_be_enforced_the_schema_is_refused(schema):
    with pytest.raises(SchemaRefused, match="pattern"):
        Grammar(schema)


def test_a_narrowed_anyof_is_not_negated():
    """A value that the left out branch allows must not pass the `not`."""
    with pytest.raises(SchemaRefused, match="more narrowly"):
        Grammar({"type": "string", "not": DECIMAL})
    with pytest.raises(SchemaRefused, match="more narrowly"):
        Grammar({"properties": {"a": {"type": "string"}}, "not": {"properties": {"a": DECIMAL}}})
