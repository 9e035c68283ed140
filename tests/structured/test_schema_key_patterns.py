"""Test object keys: propertyNames, overlapping patterns, and limits on key counts."""

import json
import random

import jsonschema
import pytest

from mmengine.errors import InvalidRequest
from mmengine.structured_output.json_schema.normalization import SchemaRefused, normalize_schema
from mmengine.structured_output.json_schema.patterns.languages import (
    build_languages,
    combine,
    has_overlap,
    write_pattern,
)
from mmengine.structured_output.json_schema.patterns.matching import MatchBudget
from mmengine.structured_output.json_schema.patterns.pattern import parse_pattern
from tests.structured.accepting import Grammar

PATTERNS = ["^a", "b$", "^[ab]+$", "x", "^x-", "^x-a", "^.{2}$", "[0-9]", "^(a|x-)"]
VALUES: list[dict | bool] = [{"type": "integer"}, {"type": "null"}, True, {"minimum": 3}, False]
NAMES: list[dict | bool] = [
    {"pattern": "^[a-x]+$"},
    {"enum": ["a", "b", "ab"]},
    {"maxLength": 2},
    {"minLength": 1, "maxLength": 3, "pattern": "a"},
    {"const": "a"},
    {"type": "string"},
    {"anyOf": [{"pattern": "^a"}, {"const": "b"}]},
    {"type": "integer"},
]
KEYS = ["a", "b", "ab", "x-1", "zz", "x-a", "aa", "b0", "q", "xx", "x", "é", "", "a b", "bb"]


def an_object(source: random.Random) -> dict:
    schema: dict = {"type": "object"}
    if source.random() < 0.6:
        names = source.sample(["a", "b", "ab", "x-1", "zz"], source.randint(1, 3))
        schema["properties"] = {name: source.choice(VALUES[:4]) for name in names}
    if source.random() < 0.6:
        texts = source.sample(PATTERNS, source.randint(1, 3))
        schema["patternProperties"] = {text: source.choice(VALUES) for text in texts}
    if source.random() < 0.5:
        schema["additionalProperties"] = source.choice(VALUES)
    if source.random() < 0.4:
        schema["propertyNames"] = source.choice(NAMES)
    if source.random() < 0.3:
        schema["required"] = source.sample(["a", "b", "ab", "q"], source.randint(1, 2))
    if source.random() < 0.4:
        schema["minProperties"] = source.randint(0, 1)
    if source.random() < 0.4:
        schema["maxProperties"] = source.randint(1, 3)
    return schema


def test_random_objects() -> None:
    assert sum(is_enforced(seed) for seed in range(40)) > 28


def is_enforced(seed: int) -> bool:
    """Return whether the random schema of `seed` is accepted. If so, check that the grammar enforces the
    schema.
    """
    source = random.Random(seed)
    schema = an_object(source)
    referee = jsonschema.Draft202012Validator(schema)
    try:
        grammar = Grammar(schema)
    except InvalidRequest:
        return False
    named = list(dict.fromkeys((*schema.get("properties", {}), *schema.get("required", ()))))
    for _ in range(25):
        keys = source.sample(KEYS, source.choice([0, 1, 1, 2, 2, 3]))
        keys.sort(key=lambda key: named.index(key) if key in named else len(named))
        instance = {key: source.choice([1, 5, None, "s"]) for key in keys}
        text = json.dumps(instance, ensure_ascii=False)
        assert grammar.accepts(text) == referee.is_valid(instance), (schema, text)
    text = grammar.walk(source, 100)
    if text is not None:
        referee.validate(json.loads(text))
    return True


@pytest.mark.parametrize("seed", range(20))
def test_random_patterns_of_two_schemas(seed: int) -> None:
    source = random.Random(seed)
    ours, theirs = (
        {
            "patternProperties": {text: source.choice(VALUES) for text in source.sample(PATTERNS, 2)},
            "additionalProperties": source.choice(VALUES),
        }
        for _ in range(2)
    )
    schema = {"type": "object", **ours, "allOf": [theirs]}
    referee, grammar = jsonschema.Draft202012Validator(schema), Grammar(schema)
    for _ in range(30):
        instance = {
            key: source.choice([1, 5, None, "s"]) for key in source.sample(KEYS, source.randint(0, 2))
        }
        text = json.dumps(instance, ensure_ascii=False)
        assert grammar.accepts(text) == referee.is_valid(instance), (schema, text)


@pytest.mark.parametrize("seed", range(20))
def test_combined_pattern_languages(seed: int) -> None:
    source = random.Random(seed)
    regexes = [parse_pattern(text).regex for text in source.sample(PATTERNS, 2)]
    wanted = source.choice([[True, False], [True, True], [False, True]])
    budget = MatchBudget()
    language = combine(build_languages(regexes, budget), wanted.__eq__, budget)
    texts = ["".join(source.choices("abx-0é\n", k=source.randint(0, 5))) for _ in range(300)]
    expected = [[budget.matches(regex, text) for regex in regexes] == wanted for text in texts]
    if language.is_empty():
        assert not any(expected)
    else:
        assert [budget.matches(write_pattern(language), text) for text in texts] == expected
    together = any(all(budget.matches(regex, text) for regex in regexes) for text in texts)
    assert has_overlap(*regexes, budget) or not together


def test_listed_names_come_in_any_order() -> None:
    grammar = Grammar({"propertyNames": {"enum": ["N", "NE", "S"]}, "type": "object"})
    assert grammar.accepts('{"S":1,"N":2}') and not grammar.accepts('{"W":1}')


def test_too_many_kinds_of_keys_are_refused() -> None:
    patterns = {letter: {"type": "null"} for letter in "abcdef"}
    with pytest.raises(
        SchemaRefused, match='may match "a" and another pattern, and .* than 16 kinds of keys'
    ):
        normalize_schema({"type": "object", "patternProperties": patterns})


def test_key_patterns_that_take_too_long_are_refused() -> None:
    names = {"pattern": "(a|b|c)(.*d){9}", "maxLength": 200}
    with pytest.raises(SchemaRefused, match="propertyNames at #/propertyNames: "):
        normalize_schema({"type": "object", "propertyNames": names})
