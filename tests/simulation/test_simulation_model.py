"""Tests that the vectorized fake model gives the same tokens as `token`, a reference for a single token."""

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import token

from mmengine.simulation.fake_model import BAD_TOKEN, FakeModel
from mmengine.simulation.hashing import crc_of_numbers, prefix_state
from mmengine.simulation.workload import SimRequest, generated_tokens

RANGES = ((2000, 2010), (3000, 3005), (1500, 1501))


@given(st.text(max_size=12), st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20))
@settings(max_examples=100, deadline=None)
def test_checksums_are_those_of_zlib(text, numbers):
    state = np.array([prefix_state(text)], np.uint32)
    expected = [zlib.crc32(f"{text}{number}".encode()) for number in numbers]
    assert crc_of_numbers(state, np.array(numbers)).tolist() == expected


def model_of(raws):
    model = FakeModel(8)
    for row, raw in enumerate(raws):
        request = SimRequest(
            raw["id"],
            raw["prompt"][0][2],
            lambda: None,
            50,
            stop_token=raw.get("stop_token", -1),
            stop_at=raw.get("stop_at", -1),
            ranges=tuple(raw["grammar"]["ranges"]) if "grammar" in raw else (),
            bad_at=raw.get("inject_bad_at", -1),
        )
        model.set_row(row, request, 1000)
    return model


RAWS = [
    {"id": "plain", "prompt": [["gen", "x", 9, 0]]},
    {"id": "stops", "prompt": [["gen", "x", 30, 0]], "stop_token": 900, "stop_at": 2},
    {"id": "bound", "prompt": [["gen", "x", 99, 0]], "grammar": {"ranges": RANGES}},
    {"id": "breaks", "prompt": [["gen", "x", 5, 0]], "grammar": {"ranges": RANGES[:1]}, "inject_bad_at": 3},
]


def test_tokens_follow_the_rules():
    model, lengths = model_of(RAWS), np.array([9, 30, 99, 5])
    tokens = model.tokens(np.arange(4), lengths[:, None] + np.arange(6))
    assert tokens.tolist() == [[token(raw, index) for index in range(6)] for raw in RAWS]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_drafts_are_right_as_often_as_a_checksum_says(count):
    # A checksum gives the number of right drafts, which come first.
    model, lengths = model_of(RAWS), np.array([9, 30, 99, 5])
    for output in range(12):
        drafts, valid = model.drafts(np.arange(4), lengths + output, count)
        for row, raw in enumerate(RAWS):
            place = int(lengths[row]) + output
            right = zlib.crc32(f"acc:{raw['id']}:{place}".encode()) % (count + 1)
            honest = {**raw, "inject_bad_at": None}
            expected = [token(honest, output + i) for i in range(count)]
            assert drafts[row, :right].tolist() == expected[:right]
            if "grammar" not in raw:
                assert not set(drafts[row, right:].tolist()) & set(expected[right:])
            allowed = ~model.breaks_grammar(
                np.full(1, row), np.arange(place, place + count)[None], drafts[row][None]
            )[0]
            assert valid[row] == (count if allowed.all() else int(allowed.argmin()))


def test_some_drafts_break_the_grammar():
    model = model_of([RAWS[2]])
    drafts = [model.drafts(np.zeros(1, int), np.array([99 + i]), 3)[0] for i in range(40)]
    assert (np.concatenate(drafts) == BAD_TOKEN).any()


def test_generated_text_does_not_depend_on_where_it_is_cut():
    whole = generated_tokens("key", 0, 120)
    assert np.array_equal(whole[95:105], generated_tokens("key", 95, 10))
    assert whole[0] == 1000 + zlib.crc32(b"key:0") % 30000
