"""Tests that matching names against patterns gives Python's results in bounded time."""

import random
import re

import pytest

from mmengine.structured_output.json_schema.normalization import SchemaRefused, normalize_schema
from mmengine.structured_output.json_schema.patterns import complement
from mmengine.structured_output.json_schema.patterns.character_sets import PatternError
from mmengine.structured_output.json_schema.patterns.matching import MatchBudget
from mmengine.structured_output.json_schema.patterns.pattern import parse_pattern

ATOMS = [
    "a",
    "b",
    "c",
    "[ab]",
    "[^a]",
    ".",
    "\\d",
    "\\s",
    "é",
    "\\n",
    "\\.",
    "-",
    "\\]",
    "[\\]\\-x]",
    "\U0001f600",
]
TIMES = ["*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}"]


def pattern(source, depth):
    kind = source.random()
    if not depth or kind < 0.35:
        return source.choice(ATOMS)
    one, other = pattern(source, depth - 1), pattern(source, depth - 1)
    if kind < 0.55:
        return one + other
    return f"({one}|{other})" if kind < 0.7 else f"(?:{one}){source.choice(TIMES)}"


def test_results_equal_pythons_matcher():
    source, budget, seen = random.Random(3), MatchBudget(10**9), [0, 0]
    while sum(seen) < 3000:
        text = source.choice(["", "^"]) + pattern(source, 4) + source.choice(["", "$"])
        regex = parse_pattern(text).regex
        for _ in range(3):
            name = "".join(source.choice("aabbc1é\n.-]\U0001f600 x") for _ in range(source.randint(0, 8)))
            expected = re.fullmatch(regex, name) is not None
            assert budget.matches(regex, name) == expected, (text, regex, name)
            seen[expected] += 1
    assert min(seen) > 300


@pytest.mark.timeout(60)
def test_a_backtracking_pattern_is_matched_in_bounded_time():
    schema = {"properties": {"a" * 400 + "b": {}}, "patternProperties": {"^(a|aa)+$": {"type": "null"}}}
    assert normalize_schema(schema)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("names", "patterns", "pointer"),
    [
        (["x" * 300_000], ["x.*x.*x.*x.*x.*y"], "#/patternProperties/x.*x.*x.*x.*x.*y"),
        (["a"], [f"^(?:[ab]?){{{9999 - k}}}$" for k in range(12)], "#/patternProperties/^(?:[ab]?){99"),
        ([f"n{k}" for k in range(4000)], [f"^p{k}[a-z]" for k in range(4000)], "#/patternProperties/^p"),
    ],
)
def test_slow_comparisons_are_refused(names, patterns, pointer):
    schema = {"properties": dict.fromkeys(names, True), "patternProperties": dict.fromkeys(patterns, True)}
    with pytest.raises(
        SchemaRefused, match="comparing the pattern with names and values takes too long"
    ) as caught:
        normalize_schema(schema)
    assert caught.value.keyword == "patternProperties" and caught.value.pointer.startswith(pointer)


SLOW = "^(?:[a-z]?){2000}$"
NAMES = ["abcdefghijklm"[k % 9 :] + f"{k:05}" for k in range(20_000)]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"enum": NAMES, "not": {"pattern": SLOW}}, "not"),
        (
            {
                "type": "object",
                "additionalProperties": False,
                "properties": dict.fromkeys(NAMES[:4_000], True),
                "propertyNames": {"pattern": SLOW},
            },
            "propertyNames",
        ),
    ],
)
def test_all_comparisons_of_a_schema_share_a_budget(schema: dict, keyword: str) -> None:
    with pytest.raises(
        SchemaRefused, match="comparing the pattern with names and values takes too long"
    ) as caught:
        normalize_schema(schema)
    assert caught.value.keyword == keyword


@pytest.mark.timeout(60)
def test_a_large_pattern_is_compiled_once() -> None:
    assert normalize_schema({"enum": NAMES, "not": {"pattern": "^" + "[a-z]{999}" * 9 + "$"}})


def test_values_beside_an_unsupported_pattern_are_not_listed() -> None:
    # `uniqueItems` requires a list of valid items. The `enum` cannot be matched against a pattern with \p.
    items = {"enum": ["a", "b"], "pattern": "\\p{L}"}
    with pytest.raises(SchemaRefused) as caught:
        normalize_schema({"type": "array", "uniqueItems": True, "items": items})
    assert caught.value.keyword == "uniqueItems"


def test_a_failed_complement_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(complement, "_build_complement", lambda regex, _: asked.append(regex) or _raise())
    for _ in range(3):
        with pytest.raises(PatternError, match="too much"):
            complement.complement_pattern("never asked elsewhere")
    assert len(asked) == 1


def _raise() -> None:
    raise PatternError("too much")
