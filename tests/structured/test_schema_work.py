"""Tests that all comparisons between a schema's branches share a work limit."""

import pytest

from mmengine.structured_output.json_schema import work
from mmengine.structured_output.json_schema.normalization import SchemaRefused, normalize_schema
from mmengine.structured_output.json_schema.patterns.matching import MatchBudget


def strings(count):
    return [{"type": "string", "pattern": f"a.*{i}"} for i in range(count)]


SCHEMAS = {
    "oneOf": {"oneOf": strings(60)},
    "objects": {"oneOf": [{"properties": {"k": one}, "required": ["k"]} for one in strings(60)]},
    "not": {"allOf": [{"type": "string"}, *({"not": one} for one in strings(300))]},
    "enum": {"allOf": [{"enum": [f"a{i}b" * 20 for i in range(400)]}, *strings(60)]},
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_comparisons_end_at_the_limit_and_name_the_keyword(name, monkeypatch):
    monkeypatch.setattr(work, "MAX_STEPS", 50_000)
    with pytest.raises(SchemaRefused, match="take too long to compare") as refused:
        normalize_schema(SCHEMAS[name])
    assert name not in ("oneOf", "objects") or refused.value.keyword == "oneOf"


def test_a_cached_comparison_counts_like_a_new_one():
    left = []
    for _ in range(2):
        with work.limited_work():
            normalize_schema({"oneOf": strings(4)})
            left.append(work._work.get().steps_left)
    assert left[0] == left[1] < work.MAX_STEPS


def test_schemas_in_one_block_share_its_limits(monkeypatch):
    monkeypatch.setattr(work, "MAX_STEPS", 60_000)
    with work.limited_work(), pytest.raises(SchemaRefused, match="take too long"):
        for _ in range(100):
            normalize_schema({"oneOf": strings(4)})


def test_time_is_limited_too(monkeypatch):
    monkeypatch.setattr(work, "MAX_SECONDS", -1.0)
    with pytest.raises(SchemaRefused, match="take too long"):
        normalize_schema({"oneOf": strings(2)})


def test_many_key_patterns_are_refused_by_keyword(monkeypatch):
    patterns = {f"^a{i}.*b": {"type": "string"} for i in range(500)}
    monkeypatch.setattr(MatchBudget.__init__, "__defaults__", (100_000,))
    with pytest.raises(SchemaRefused) as refused:
        normalize_schema({"type": "object", "patternProperties": patterns})
    assert (refused.value.keyword, refused.value.pointer) == ("patternProperties", "#/patternProperties")


def test_many_patterns_of_one_string_are_refused():
    """Without the limit, the grammar engine would allocate gigabytes for the patterns' intersection, and end
    the process.
    """
    schema = {"allOf": [{"type": "string", "pattern": f"^.*a{n}.*$"} for n in range(17)]}
    with pytest.raises(SchemaRefused, match="more than 16 patterns") as refused:
        normalize_schema({"type": "object", "properties": {"k": schema}})
    assert refused.value.keyword == "pattern"
    normalize_schema({"allOf": schema["allOf"][:16]})
    normalize_schema({"allOf": [{"enum": ["a0", "b"]}, *schema["allOf"][:1] * 30]})


def test_large_multiples_are_refused_by_keyword():
    """The grammar engine has a state for each remainder. Ten million remainders would take a gigabyte and a
    minute.
    """
    large = ({"multipleOf": 9_999_991}, {"allOf": [{"multipleOf": one} for one in (101, 103, 107, 109)]})
    many = {"properties": {f"p{n}": {"type": "integer", "multipleOf": 9901 + 2 * n} for n in range(80)}}
    for schema, text in (*((one, "more than 250,000 remainders") for one in large), (many, "take too long")):
        with pytest.raises(SchemaRefused, match=text) as refused:
            normalize_schema({"type": "integer", **schema} if schema is not many else schema)
        assert refused.value.keyword == "multipleOf"
    for multiple in (86_400, 1_000_000_000, 5_000_000, 0.01, 65_536):
        normalize_schema({"type": "number", "multipleOf": multiple})


def test_work_that_is_no_longer_needed_ends():
    class NotNeeded(Exception):
        pass

    def check():
        raise NotNeeded

    with pytest.raises(NotNeeded), work.limited_work(check):
        normalize_schema({"oneOf": strings(2)})
