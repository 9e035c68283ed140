"""Tests that each row gets drafts from the first drafter with drafts, within the drafter's limit and the
row's grammar.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from mmengine.core.executor import Admission
from mmengine.request import Request, SamplingParams
from mmengine.runtime.drafting.next_drafts import Drafting
from mmengine.runtime.rows import RowColumns
from mmengine.spec_decode.base import Proposed
from mmengine.structured_output.request.spec import grammar_of

VOCAB, ROWS, MOST, LONGEST = 50, 4, 5, 40
FOR = ((0, 1, 2, 3), (1, 2, 3), (0, 1, 2, 3))  # for each drafter, the rows with drafts
REGEX = grammar_of(grammar={"regex": "a*"})
NOBODY = np.zeros((0, 0), np.int32)


def drafter(number, rows_of):
    """Return a drafter that drafts the token `number` up to the limit, for the rows in `rows_of`."""

    def propose(rows, texts, most):
        counts = np.where(np.isin(rows, rows_of), most, 0)
        return Proposed(np.full(counts.sum(), number, np.int32), counts)

    return SimpleNamespace(
        name=f"{number}",
        leave=lambda row, texts: None,
        admit=lambda row, request, texts: True,
        propose=propose,
    )


def drafted(room, max_tokens=30, prompt=6, bound=(), matchers=None):
    """Return (drafter, number of drafts) for each row, or None for a row without drafts. `room`: draft limits
    [drafters, rows]. `bound`: rows with a grammar.
    """
    rows = RowColumns(ROWS, VOCAB, (), lambda ids, _: (np.zeros((3, len(ids)), np.int32), 0))
    drafters = [drafter(number, of) for number, of in enumerate(FOR)]
    drafting = Drafting(drafters, MOST, LONGEST, VOCAB, rows, matchers)
    for row in range(ROWS):
        tokens, form = np.zeros(prompt, np.int32), REGEX if row in bound else None
        request = Request(f"{row}", tokens, SamplingParams(max_tokens=max_tokens), grammar=form)
        admission = Admission(row, request, tokens)
        rows.admit(admission)
        drafting.admit(admission)
    everyone, ones = np.arange(ROWS), np.ones(ROWS, np.int64)
    found = drafting.drafts(everyone, np.zeros(ROWS, np.int32), ones, everyone, room=room)
    assert drafting.failures == [0] * len(drafters)
    if found is None:
        return [None] * ROWS
    assert found.token_ids.tolist() == np.repeat(found.drafters, found.counts).tolist()
    pairs = zip(found.drafters.tolist(), found.counts.tolist(), strict=True)
    return [(who, count) if count else None for who, count in pairs]


@pytest.mark.parametrize(
    "room, want",
    [
        (None, [(0, 5)] * 4),
        (NOBODY, [None] * 4),
        ([[9, 3, 0, 1]], [(0, 5), (0, 3), None, (0, 1)]),
        # `room` has limits for two of three drafters, so the third drafter has the second drafter's limits.
        ([[0, 0, 2, 0], [4, 4, 4, 0]], [(2, 4), (1, 4), (0, 2), None]),
        ([[0, 0, 0, 0], [0, 1, 0, 0], [2, 2, 3, 0]], [(2, 2), (1, 1), (2, 3), None]),
        ([[0] * 4, [0] * 4, [0] * 4], [None] * 4),
    ],
)
def test_drafters_and_draft_counts_of_each_row(room, want):
    assert drafted(room if room is None else np.array(room, np.int32)) == want


@pytest.mark.parametrize(
    "settings, count",
    [
        ({"max_tokens": 4}, 2),  # 4, minus the token of the first step, minus the last token
        ({"max_tokens": 2}, 0),
        ({"max_tokens": 300, "prompt": LONGEST - 4}, 2),  # prompt and answer have at most LONGEST tokens
        ({"max_tokens": 300, "prompt": LONGEST - 2}, 0),
    ],
)
def test_drafts_fit_the_remaining_answer(settings, count):
    assert drafted(None, **settings) == [(0, count) if count else None] * ROWS


def test_drafts_fit_the_grammar():
    """Drafts that the grammar does not allow are dropped. Row 2 has no grammar."""
    matchers = SimpleNamespace(num_allowed=lambda row, drafts: min(row, len(drafts)))
    found = drafted(None, bound=(0, 1, 3), matchers=matchers)
    assert found == [None, (0, 1), (0, 5), (0, 3)]
