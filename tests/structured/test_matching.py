"""Names against patterns: what Python's own matcher says, in a time that has a bound."""

import random
import re

import pytest

from mmengine.structured_output.json_schema.characters import PatternError
from mmengine.structured_output.json_schema.gate import SchemaRefused, gate
from mmengine.structured_output.json_schema.matching import Budget
from mmengine.structured_output.json_schema.pattern import parse_pattern

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


def test_it_agrees_with_the_matcher_of_python():
    source, budget, seen = random.Random(3), Budget(10**9), [0, 0]
    while sum(seen) < 3000:
        text = source.choice(["", "^"]) + pattern(source, 4) + source.choice(["", "$"])
        try:
            regex = parse_pattern(text).regex
        except PatternError:  # a repetition of a repetition
            continue
        for _ in range(3):
            name = "".join(source.choice("aabbc1é\n.-]\U0001f600 x") for _ in range(source.randint(0, 8)))
            expected = re.fullmatch(regex, name) is not None
            assert budget.matches(regex, name) == expected, (text, regex, name)
            seen[expected] += 1
    assert min(seen) > 300


@pytest.mark.timeout(60)
def test_a_pattern_that_goes_back_for_ever_is_compared_all_the_same():
    schema = {"properties": {"a" * 400 + "b": {}}, "patternProperties": {"^(a|aa)+$": {"type": "null"}}}
    assert gate(schema)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("names", "patterns", "pointer"),
    [
        (["x" * 300_000], ["x.*x.*x.*x.*x.*y"], "#/patternProperties/x.*x.*x.*x.*x.*y"),
        (["a"], [f"^(?:[ab]?){{{9999 - k}}}$" for k in range(12)], "#/patternProperties/^(?:[ab]?){99"),
        ([f"n{k}" for k in range(4000)], [f"^p{k}[a-z]" for k in range(4000)], "#/patternProperties/^p"),
    ],
)
def test_what_takes_too_long_is_refused(names, patterns, pointer):
    schema = {"properties": dict.fromkeys(names, True), "patternProperties": dict.fromkeys(patterns, True)}
    with pytest.raises(SchemaRefused, match="too long to compare it with the names in properties") as caught:
        gate(schema)
    assert caught.value.keyword == "patternProperties" and caught.value.pointer.startswith(pointer)
