"""Tests the keywords `not`, oneOf, anyOf, `if`, dependentSchemas and unevaluated…. The masks accept exactly
the valid instances.
"""

import json
from collections.abc import Sequence

import jsonschema
import pytest

from mmengine.errors import InvalidRequest
from mmengine.structured_output.json_schema.normalization import Bounds, normalize_schema
from mmengine.structured_output.json_schema.patterns.character_sets import PatternError
from mmengine.structured_output.json_schema.patterns.complement import complement_pattern, may_overlap
from mmengine.structured_output.json_schema.patterns.matching import MatchBudget
from mmengine.structured_output.json_schema.patterns.pattern import parse_pattern
from tests.structured.accepting import Grammar
from tests.structured.logic_schemas import Source, accepts_some_order

TAGGED = [  # Closed objects that differ in an optional constant.
    {"properties": {"kind": {"const": kind}, kind: {"type": "integer"}}, "additionalProperties": False}
    for kind in ("cat", "dog")
]
EXACT: list[tuple[dict, list, list]] = [
    # schema, valid instances, invalid instances
    ({"not": {"type": "string"}}, [1, None, {}], ["", "a"]),
    ({"type": "string", "not": {"const": "a"}}, ["", "b", "aa", "é"], ["a", 1]),
    ({"type": "string", "not": {"enum": ["a", "ab"]}}, ["", "b", "abc"], ["a", "ab"]),
    ({"type": "string", "not": {"pattern": "ab"}}, ["", "a", "b", "aab"[:2]], ["ab", "xabx"]),
    ({"type": "string", "not": {"minLength": 2}}, ["", "a"], ["ab"]),
    ({"type": "number", "not": {"minimum": 2}}, [1, -3, 1.5], [2, 2.5, 3]),
    ({"type": "integer", "not": {"enum": [0, 2]}}, [-1, 1, 3], [0, 2]),
    ({"type": "integer", "not": {"type": "number", "exclusiveMaximum": 3}}, [3, 4], [2, -1]),
    ({"not": {"not": {"required": ["a"]}}}, [1, {"a": 1}], [{}, {"b": 1}]),
    ({"type": "object", "not": {"required": ["a", "b"]}}, [{}, {"a": 1}, {"b": 1}], [{"a": 1, "b": 1}]),
    ({"type": "object", "not": {"properties": {"a": {"const": 1}}}}, [{"a": 2}], [{}, {"a": 1}]),
    (
        {"type": "object", "not": {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}},
        [{}, {"c": 1}],
        [{"a": 1}, {"b": 1}],
    ),
    ({"type": "array", "not": {"maxItems": 1}}, [[1, 2], [1, 2, 3]], [[], [1]]),
    (
        {"type": "array", "not": {"items": {"type": "string"}}},
        [[1], ["a", 1], ["a", "b", None, "c"]],
        [[], ["a"], ["a", "b"]],
    ),
    (
        {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": 1}, {"b": 1, "c": 2}],
        [{}, {"a": 1, "b": 1}],
    ),
    ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 1}], [1, "x", {}]),
    (
        {"oneOf": [{"required": ["a", "b", "c"]}, {"required": ["a", "b", "d"]}], "type": "object"},
        [{"a": 1, "b": 1, "c": 1}, {"a": 1, "b": 1, "d": 1}],
        [{"a": 1, "b": 1}, {"a": 1, "b": 1, "c": 1, "d": 1}],
    ),
    (
        {"type": "object", "oneOf": TAGGED},
        [{"kind": "cat"}, {"cat": 1}, {"kind": "dog", "dog": 2}],
        [{}, {"kind": "cat", "dog": 1}, {"kind": "cow"}],
    ),
    (
        {"oneOf": [{"type": "array", "items": {"type": t}} for t in ("number", "string")]},
        [[1], ["a", "b"]],
        [[], [1, "a"], 1],
    ),
    (
        {"type": "object", "oneOf": [{"properties": {"a": {"pattern": f"^{x}$"}}} for x in ("on", "off")]},
        [{"a": "on"}, {"a": "off"}],
        [{}, {"a": "x"}, {"a": 1}],
    ),
    ({"type": "integer", "oneOf": [{"minimum": 2}, {"maximum": 5}]}, [1, 6], [2, 5, 3]),
    (
        {
            "type": "object",
            "if": {"properties": {"a": {"const": 1}}, "required": ["a"]},
            "then": {"required": ["b"]},
            "else": {"required": ["c"]},
        },
        [{"a": 1, "b": 0}, {"a": 2, "c": 0}, {"c": 0}],
        [{"a": 1}, {"a": 1, "c": 0}, {"b": 0}],
    ),
    ({"if": {"type": "string"}, "then": {"minLength": 2}}, ["ab", 1, None], ["a", ""]),
    (
        {"type": "object", "dependentRequired": {"a": ["b"], "b": ["a"]}},
        [{}, {"a": 1, "b": 1}],
        [{"a": 1}, {"b": 1}],
    ),
    (
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "anyOf": [{"properties": {"b": True}, "required": ["b"]}, {"properties": {"c": True}}],
            "unevaluatedProperties": False,
        },
        [{"a": 1, "b": 1}, {"a": 1, "c": 1}, {"b": 1, "c": 1}, {}],
        [{"d": 1}, {"a": 1, "b": 1, "d": 1}],
    ),
    (
        {"unevaluatedProperties": False, "not": {"not": {"properties": {"a": True}}}, "type": "object"},
        [{}],
        [{"a": 1}],
    ),
    (
        {"type": "array", "allOf": [{"prefixItems": [{"type": "string"}]}], "unevaluatedItems": False},
        [[], ["a"]],
        [[1], ["a", 1]],
    ),
    (
        {"anyOf": [False, {"type": "null"}], "oneOf": [{"allOf": [False]}, True]},
        [None],
        [1],
    ),
]


@pytest.mark.parametrize(("schema", "valid", "invalid"), EXACT)
def test_exact(schema: dict, valid: list, invalid: list) -> None:
    referee = jsonschema.Draft202012Validator(schema)
    grammar = Grammar(schema)
    for instance in valid:
        assert referee.is_valid(instance), instance
        assert accepts_some_order(grammar, instance), (instance, grammar.text)
    for instance in invalid:
        assert not referee.is_valid(instance), instance
        assert not accepts_some_order(grammar, instance), (instance, grammar.text)


@pytest.mark.parametrize(
    "seeds",
    [
        [*range(100), 490],  # The grammar for seed 490 is narrower than its schema.
        pytest.param(range(100, 4_000), marks=pytest.mark.soak),
        pytest.param(range(4_000, 8_000), marks=pytest.mark.soak),
    ],
    ids=["some", "many", "more"],
)
def test_random_schemas_accept_valid_instances(seeds: Sequence[int]) -> None:
    """With odd seeds, a valid instance is accepted in its own key order. With even seeds, or if the grammar
    is narrower than the schema, the accepted key order may be another.
    """
    taken = 0
    for seed in seeds:
        source = Source(seed)
        schema = source.document()
        try:
            grammar = Grammar(schema, Bounds.off() if seed % 2 else None)
        except InvalidRequest:
            continue
        taken += 1
        referee = jsonschema.Draft202012Validator(schema)
        narrow = any("enforced more narrowly" in note.text for note in grammar.narrow)
        for _ in range(12):
            instance = source.instance()
            try:
                valid = referee.is_valid(instance)
            except RecursionError:  # A reference refers to itself for the same value.
                break
            if seed % 2 and not grammar.narrow:  # A narrower grammar may fix the key order.
                accepted = grammar.accepts(json.dumps(instance, ensure_ascii=False))
            else:
                accepted = accepts_some_order(grammar, instance)
            assert accepted == valid or narrow and valid, (seed, schema, instance)
    assert taken > len(seeds) // 2


@pytest.mark.parametrize("text", ["^a", "a1", "foo|bar", r"^\d{2}-\d$", '^[^"]{1,2}$', "^(red|green)$", ""])
def test_the_complement_of_a_pattern(text: str) -> None:
    source = Source(1).random
    pattern = parse_pattern(text)
    other = complement_pattern(pattern.regex)
    words = ["", "red", "green", "foo", "bar", "a1", "12-3", '"', "\n", "\0", "a\0"]
    words += ["".join(source.choices('a1-"r3\\é', k=source.randint(0, 5))) for _ in range(300)]
    for word in words:
        matches = MatchBudget().matches(pattern.regex, word)
        assert MatchBudget().matches(other.regex, word) != matches, word


def test_overlapping_patterns() -> None:
    def meeting(a: str, b: str) -> bool:
        return may_overlap(parse_pattern(a).regex, parse_pattern(b).regex)

    assert not meeting("^on$", "^off$") and not meeting("^[a-c]+$", "^[d-z]+$")
    assert meeting("on", "off") and meeting("^[a-c]*$", "^[d-z]*$") and meeting('^[^"]$', "^\\x00$")


def test_a_complement_is_short() -> None:
    """A long pattern would make the grammar engine slow."""
    assert len(complement_pattern(parse_pattern("^[a-zA-Z]+(?:(?:\\s+|-)[a-zA-Z]+)*$").regex).regex) < 900
    assert (
        len(complement_pattern(parse_pattern("^(air|bundle|native|ipa-app-store|ipa-debug)$").regex).regex)
        < 4_000
    )


def test_branches_whose_patterns_are_complementary_except_nul() -> None:
    """Both branches allow U+0000, so `oneOf` must refuse U+0000."""
    no_zero = {"type": "string", "not": {"pattern": "^[^\\x00]$"}}
    grammar = Grammar({"oneOf": [no_zero, {"type": "string", "pattern": "^\\x00$"}]})
    assert not grammar.accepts(json.dumps("\0"))


def test_a_complement_that_is_too_large_is_refused() -> None:
    with pytest.raises(PatternError):
        complement_pattern(parse_pattern("a.{20}b").regex)


BRANCHES = {
    "anyOf": [{"properties": {"b": {"type": "integer"}}}, {"properties": {"c": {"type": "null"}}}],
    "properties": {"a": {"type": "boolean"}},
    "type": "object",
    "required": ["a"],
    "additionalProperties": True,
}


@pytest.mark.parametrize("text", ['{"a":true,"b":1}', '{"b":1,"a":true}', '{"c":null,"a":true}'])
def test_keys_of_branches_come_before_those_of_the_base_and_behind(text: str) -> None:
    assert Grammar(BRANCHES).accepts(text)


def test_many_dependencies_stay_small() -> None:
    names = [f"n{at}" for at in range(12)]
    schema = {"type": "object", "dependentRequired": dict.fromkeys(names, names)}
    text = normalize_schema(schema, Bounds.off()).text
    assert len(text) < 20_000, len(text)
    grammar = Grammar(schema)
    assert grammar.accepts("{}") and grammar.accepts(json.dumps(dict.fromkeys(names)))
    assert not grammar.accepts(json.dumps(dict.fromkeys(names[1:])))


def test_a_narrower_language_is_noted() -> None:
    texts = {"type": "array", "items": {"type": "string"}}
    lists = {"oneOf": [texts, {**texts, "items": {"type": ["string", "integer"]}}]}
    (note,) = normalize_schema(lists).narrow
    assert note.keyword == "oneOf" and note.pointer == "#/oneOf" and "more narrowly" in note.text
    assert not normalize_schema({"not": {"type": "string"}}).narrow
    assert not normalize_schema({"oneOf": [texts, {**texts, "prefixItems": [True]}]}).narrow, (
        "only the first item can violate the first schema and match the second"
    )
