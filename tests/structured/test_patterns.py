"""Tests that grammars for patterns, with and without length limits, accept the same strings as
Python's `re`. A pattern is refused if the grammar engine could fail during an answer.
"""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmengine.structured_output.json_schema.normalization import SchemaRefused
from mmengine.structured_output.json_schema.patterns.pattern import parse_pattern
from tests.structured.accepting import Grammar, allowed

ATOMS = st.sampled_from(["a", "b", "[ab]", "[^a]", r"\d", "ab", "."])
TIMES = st.sampled_from(["", "*", "+", "?", "{2}", "{0,2}", "{1,3}", "{2,}", "{0}"])
GROUPS = st.recursive(
    ATOMS,
    lambda inner: st.tuples(st.lists(inner, min_size=1, max_size=2), TIMES, st.sampled_from(["", "|"])).map(
        lambda drawn: f"({drawn[2].join(drawn[0])}){drawn[1]}"
    ),
    max_leaves=5,
)
PATTERNS = st.tuples(st.sampled_from(["", "^"]), GROUPS, TIMES, GROUPS, st.sampled_from(["", "$"])).map(
    lambda drawn: f"{drawn[0]}({drawn[1]}){drawn[2]}{drawn[3]}{drawn[4]}"
)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    PATTERNS,
    st.lists(st.text("ab1-", max_size=7), min_size=6, max_size=6),
    st.integers(0, 3),
    st.integers(3, 6),
)
def test_nested_repetitions_match_as_in_python(pattern: str, texts: list[str], low: int, high: int) -> None:
    wanted = [re.search(pattern, text) is not None for text in texts]
    lengths = [low <= len(text) <= high for text in texts]
    try:
        grammar = Grammar({"type": "string", "pattern": pattern})
    except SchemaRefused as error:  # For example ^(((a)+(aa){1,3}){1,3}){1,3}a.
        assert "match in too many ways" in str(error) and pattern.count("{") > 2
        return
    assert [grammar.accepts(f'"{text}"') for text in texts] == wanted
    try:
        grammar = Grammar({"type": "string", "pattern": pattern, "minLength": low, "maxLength": high})
    except AssertionError as error:  # No string satisfies the pattern and the lengths.
        assert "empty" in str(error).lower() and not any(map(min, zip(wanted, lengths, strict=True)))
        return
    both = [a and b for a, b in zip(wanted, lengths, strict=True)]
    assert [grammar.accepts(f'"{text}"') for text in texts] == both


@pytest.mark.parametrize(
    ("pattern", "valid", "invalid"),
    [
        ("^(([a-zA-Z0-9]+)(-?))+$", "a-b1-", "a--b"),
        (r"^(https?:\/\/)?([\da-z\.-]+)\.([a-z\.]{2,6})([\/\w \.-]*)*\/?$", "http://a.de/b c", "http://a"),
        (r"^((a*)*)*b$", "aab", "ba"),
        (r"^(\w+\.)*\w+$", "a.b.c", "a..b"),
    ],
)
def test_nested_repetitions_are_accepted(pattern: str, valid: str, invalid: str) -> None:
    grammar = Grammar({"type": "string", "pattern": pattern})
    assert grammar.accepts(json.dumps(valid)) and not grammar.accepts(json.dumps(invalid))
    walked = grammar.matcher.deep_copy()
    for byte in ('"' + "a" * 300).encode():
        assert byte in allowed(walked) and walked.consume_token(byte)


@pytest.mark.parametrize("pattern", ["^(a{1,50}){50}$", "^(.{0,64}){0,64}$", "^(?:.{1,20}){1,20}$"])
def test_ambiguous_counts_are_refused(pattern: str) -> None:
    """The grammar engine compiles these patterns, but has too many states after some letters."""
    with pytest.raises(SchemaRefused, match="match in too many ways") as refusal:
        Grammar({"type": "string", "pattern": pattern})
    assert refusal.value.pointer == "#/pattern"
    assert parse_pattern(r"^([a-z]{1,63}\.){1,8}[a-z]{2,6}$").most == 518


def test_an_unanchored_repetition_is_reduced_to_its_minimum() -> None:
    assert parse_pattern("[a-z]{1,255}").regex == "(?s:.)*[a-z](?s:.)*"
    assert parse_pattern("a*").regex == "(?s:.)*"
    grammar = Grammar({"type": "object", "patternProperties": {"[a-z]{1,255}": {"type": "string"}}})
    assert grammar.accepts('{"' + "a" * 600 + '":"x"}') and not grammar.accepts('{"a1":1}')


def test_a_pattern_absorbs_a_length() -> None:
    # The lengths become part of the pattern, or are dropped if the pattern implies them.
    schema = {"type": "string", "pattern": "^([a-z][0-9])+$", "minLength": 9_999}
    grammar = Grammar(schema)
    assert '"minLength"' not in grammar.text
    assert grammar.accepts('"' + "a1" * 5_000 + '"') and not grammar.accepts('"' + "a1" * 4_999 + '"')
    assert '"maxLength"' not in Grammar({"type": "string", "pattern": "^[0-9]{5}$", "maxLength": 5}).text
