"""Tests PartialJson's values for incomplete JSON texts. Each value extends the previous value."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmengine.errors import RequestFailed
from mmengine.structured_output.partial_json import PartialJson
from mmengine.structured_output.types.types import decode

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


def values(text: str, cuts: list[int]) -> list:
    partial, found, start = PartialJson(), [], 0
    for cut in [*cuts, len(text)]:
        if partial.push(text[start:cut]):
            found.append(partial.value())
        start = cut
    if partial.finish():
        found.append(partial.value())
    return found


def goes_on(before: object, after: object) -> bool:
    """Return whether `before` could have grown to `after`."""
    if isinstance(before, str) and isinstance(after, str):
        return after.startswith(before)
    if isinstance(before, list) and isinstance(after, list):
        return len(before) <= len(after) and all(map(goes_on, before, after))
    if isinstance(before, dict) and isinstance(after, dict):
        same_order = list(after)[: len(before)] == list(before)
        return same_order and all(goes_on(before[key], after[key]) for key in before)
    return type(before) is type(after) and before == after


@given(JSON, st.booleans(), st.booleans(), st.integers(0, 2**32))
def test_partial_values_lead_to_the_value(value: object, ascii_only: bool, spaced: bool, seed: int) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=1 if spaced else None)
    source = random.Random(seed)
    cuts = sorted(source.choices(range(len(text) + 1), k=source.randrange(len(text) + 2)))
    found = values(text, cuts)
    assert found[-1] == value
    assert all(map(goes_on, found, found[1:]))


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("", []),
        ('{"a', [{}]),
        ('{"a"', [{}]),
        ('{"a":', [{}]),
        ('{"a":"', [{}, {"a": ""}]),
        ('{"a":"x\\', [{}, {"a": ""}, {"a": "x"}]),
        ('{"a":tru', [{}]),
        ('{"a":true', [{}, {"a": True}]),
        ('{"a":12', [{}]),
        ('{"a":12,', [{}, {"a": 12}]),
        ('[1.5e3 ', [[], [1500.0]]),
        ('["\\ud83d', [[], [""]]),
        ('["\\ud83d\\ude00', [[], [""], ["😀"]]),
        ('["\\ud83dx', [[], [""], ["\ud83dx"]]),
        ('["\\u00e9', [[], [""], ["é"]]),
        ('{"a":[{"b":[', [{}, {"a": []}, {"a": [{}]}, {"a": [{"b": []}]}]),
    ],
)  # fmt: skip
def test_value_of_a_prefix(text: str, known: list) -> None:
    partial, found = PartialJson(), []
    for character in text:
        if partial.push(character):
            found.append(partial.value())
    assert found == known and partial.has_value == bool(known)


def test_a_lone_number_is_known_at_its_end() -> None:
    partial = PartialJson()
    assert not partial.push("-12") and partial.finish() and partial.value() == -12


def test_a_returned_value_does_not_change() -> None:
    partial = PartialJson()
    partial.push('{"a": [1, 2')
    before = partial.value()
    partial.push('], "b": 3}')
    assert before == {"a": [1]} and partial.value() == {"a": [1, 2], "b": 3}


def test_deep_values_are_parsed_and_cut_texts_refused():
    deep = 5_000
    value = decode("[" * deep + '{"a": 1}' + "]" * deep, True)
    for _ in range(deep):
        (value,) = value
    assert value == {"a": 1}
    with pytest.raises(RequestFailed, match="ends within a value"):
        decode("[" * deep, True)
    with pytest.raises(RequestFailed, match="not a valid list"):
        decode("[" * deep + "]" * deep, list[object])
