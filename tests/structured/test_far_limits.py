"""Test that limits beyond 2**53 hold, although the grammar engine reads limits as doubles."""

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mmengine.structured_output.json_schema.normalization import Bounds
from tests.structured.accepting import Grammar

FAR = st.integers(2**53 - 4, 2**65) | st.sampled_from([2**63 - 1, 2**63, 10**17 - 1, 10**300])


@settings(max_examples=60, deadline=None, derandomize=True)
@example("integer", 2**63, 2**63 - 1, [2**63 - 1, 2**63])
@example("number", 2**62, 2**62, [2**62 + 1, -(2**62) - 1])
@given(st.sampled_from(["integer", "number"]), FAR, FAR, st.lists(FAR, min_size=3, max_size=3))
def test_numbers_beyond_a_limit_are_refused(kind: str, low: int, high: int, values: list[int]) -> None:
    schema = {"type": kind, "minimum": -low, "exclusiveMaximum": high}
    grammar, referee = Grammar(schema), jsonschema.Draft202012Validator(schema)
    near = [value + by for value in (*values, high) for by in (-1, 0, 1)] + [-low - 1, -low, 1 - low]
    for value in near:
        assert not grammar.accepts(str(value)) or referee.is_valid(value), value
    assert all(grammar.accepts(str(value)) for value in (0, 5, -7, 2**53 - 5))


@pytest.mark.parametrize("kind", ["integer", "number"])
def test_an_integer_of_64_bits(kind: str) -> None:
    grammar = Grammar({"type": kind, "minimum": 0, "maximum": 2**63 - 1})
    assert not grammar.accepts(str(2**63)) and not grammar.accepts("-1")
    assert grammar.accepts(str(2**63 - 1)) or kind == "number", (
        "for numbers, the limit is moved to the next lower double"
    )
    assert grammar.accepts("1.5") == (kind == "number")
    bounded = Grammar({"type": kind, "minimum": 0, "maximum": 2**63 - 1}, Bounds(digits=17))
    assert bounded.accepts("9" * 17) and not bounded.accepts("9" * 18)
