"""Tests that a drafter that raises, or returns invalid drafts, loses only its drafts."""

import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest
import structlog

from mmengine.core.executor import Admission
from mmengine.errors import ConfigError
from mmengine.request import Request, SamplingParams
from mmengine.runtime.drafting.head.drafter import HeadDrafter
from mmengine.runtime.drafting.next_drafts import Drafting
from mmengine.runtime.rows import RowColumns
from mmengine.spec_decode.base import Proposed
from tests.spec_decode.equality import Scripted, answers, assert_same, declare_drafter, known_as, mixed

pytest.importorskip("mmengine_shapes")


def wrong(kind, rows, most):
    """Return an invalid proposal of the given `kind`."""
    total, full = int(most.sum()), most.astype(np.intp)
    zeros = np.zeros(total, np.int32)
    return {
        "none at all": SimpleNamespace(),
        "a string": "drafts",
        "negative ids": Proposed(zeros - 1, full),
        "ids beyond": Proposed(zeros + 1536, full),
        "huge ids": Proposed(zeros.astype(np.uint64) + np.uint64(2**63), full),
        "too many": Proposed(np.zeros(total + len(rows), np.int32), full + 1),
        "negative counts": Proposed(zeros[:0], np.full(len(rows), -1)),
        "counts of half tokens": Proposed(zeros, full + 0.5 * (np.arange(len(rows)) % 2)),
        "counts of true": Proposed(np.zeros(len(rows), np.int32), np.ones(len(rows), bool)),
        "fewer tokens than said": Proposed(zeros[:-1], full),
        "more tokens than said": Proposed(np.append(zeros, 1).astype(np.int32), full),
        "half tokens": Proposed(zeros + 0.5, full),
        "counts of other rows": Proposed(zeros, np.append(full, 0)),
        "a table": Proposed(np.zeros((len(rows), int(most.max())), np.int32), full),
        "objects": Proposed(np.array([None] * total), full),
        "nan counts": Proposed(zeros, np.full(len(rows), np.nan)),
    }[kind]


KINDS = ["none at all", "a string", "negative ids", "ids beyond", "huge ids", "too many", "negative counts"]
KINDS += ["counts of half tokens", "counts of true", "fewer tokens than said", "more tokens than said"]
KINDS += ["half tokens", "counts of other rows", "a table", "objects", "nan counts"]


class Failing(Scripted):
    """A `Scripted` drafter. Every second proposal raises or is invalid. `admit` and `leave` raise for some
    rows. `num_wrong` counts the errors.
    """

    def __init__(self, truth, touch=False):
        super().__init__(truth)
        self.num_wrong, self._touch = 0, touch

    def admit(self, row, request, texts):
        super().admit(row, request, texts)
        if len(self._requests) % 3 == 2:
            self.num_wrong += 1
            raise KeyError("admit")
        return True

    def leave(self, row, texts):
        is_known = row in self._requests
        super().leave(row, texts)
        if is_known and row % 2:
            self.num_wrong += 1
            raise OSError("leave")

    def propose(self, rows, texts, most):
        good = super().propose(rows, texts, most)
        if self._step % 2:
            return good
        if self._touch:
            most += 5
            rows[:] = 0
        self.num_wrong += 1
        kind = KINDS[self._step // 2 % (len(KINDS) + 1)] if self._step // 2 % 17 < 16 else None
        if kind is None:
            raise MemoryError("propose")
        if not most.any():
            self.num_wrong -= 1
            return None
        return wrong(kind, rows, most)


@pytest.mark.parametrize("touch", [False, True])
def test_failing_drafters_change_no_answer(touch):
    asked = mixed(16, seed=5)
    want = answers(asked, spec="none")
    drafter = Failing(want.truth, touch)
    with known_as("failing", drafter), structlog.testing.capture_logs() as logs:
        found = answers(asked, spec="failing", arrivals=random.Random(3), max_num_seqs=5)
    assert_same(found, want)
    assert found.stats.steps > 16 and drafter.num_true > 20
    assert found.drafting.failures == [drafter.num_wrong] and drafter.num_wrong > 16
    told = [entry for entry in logs if "a drafter failed" in entry["event"]]
    assert len(told) == 1 and told[0]["drafter"] == "scripted"


@pytest.mark.parametrize("kind", KINDS)
def test_invalid_drafts_are_refused(kind):
    """An invalid proposal is dropped as a whole, and the next drafter's proposal is used."""
    rows = RowColumns(4, 1536, (), lambda ids, _: (np.zeros((3, len(ids)), np.int32), 0))
    wrongly = SimpleNamespace(
        name="wrong",
        leave=lambda row, texts: None,
        admit=lambda row, request, texts: True,
        propose=lambda rows, texts, most: wrong(kind, rows, most),
    )
    rightly = SimpleNamespace(**{**vars(wrongly), "name": "right"})
    rightly.propose = lambda rows, texts, most: Proposed(np.arange(len(rows)), np.ones(len(rows), np.int64))
    drafting = Drafting([wrongly, rightly], 7, 100, 1536, rows, None)
    for row in range(4):
        prompt = np.arange(3 + row, dtype=np.int32)
        admission = Admission(row, Request(f"{row}", prompt, SamplingParams(max_tokens=9)), prompt)
        rows.admit(admission)
        drafting.admit(admission)
    said, ones = np.full(4, 7, np.int32), np.ones(4, np.int64)
    drafts = drafting.drafts(np.arange(4), said, ones, np.array([0, 1, 3]))
    assert drafting.failures == [1, 0]
    assert drafts.token_ids.tolist() == [0, 1, 2]
    assert drafts.counts.tolist() == drafts.drafters.tolist() == [1, 1, 1]


def test_a_drafter_cannot_write_to_the_texts():
    asked = mixed(4, seed=8, most_tokens=12)
    want = answers(asked, spec="none", num_blocks=99)

    class Drafter(Scripted):
        def propose(self, rows, texts, most):
            for array in (texts.tokens, texts.lengths, texts.num_prompt):
                with pytest.raises(ValueError, match="read-only"):
                    array[:] = 0
            return super().propose(rows, texts, most)

    with known_as("writing", Drafter(want.truth)):
        found = answers(asked, spec="writing", num_blocks=99)
    assert_same(found, want)
    assert found.drafting.failures == [0]


def test_a_drafter_without_a_name_is_reported_by_its_class():
    class Nameless(Scripted):
        name = property()  # raises AttributeError

        def propose(self, rows, texts, most):
            raise RuntimeError("no")

    asked = mixed(3, seed=8, most_tokens=12)
    with known_as("nameless", Nameless({})), structlog.testing.capture_logs() as logs:
        found = answers(asked, spec="nameless", num_blocks=99)
    assert found.drafting.failures[0] > 0
    assert [entry["drafter"] for entry in logs if "drafter" in entry] == ["Nameless"]


def test_an_unloadable_drafter_is_refused_by_name(monkeypatch):
    def load():
        raise ImportError("no module named theirs")

    declare_drafter(monkeypatch, "theirs", load)
    with pytest.raises(ConfigError, match="spec 'theirs' cannot be loaded from its entry point: ImportError"):
        answers(mixed(1), spec="theirs")
    with pytest.raises(ConfigError, match="spec 'ours' is no drafter; known are none, auto, grammar.*theirs"):
        answers(mixed(1), spec="ours")


@pytest.mark.parametrize("method", ["catch_up", "propose"])
def test_a_head_with_occasional_failures_loses_only_its_drafts(method, monkeypatch):
    """The failures leave gaps in the drafter's own record of steps, but the answers are complete."""
    asked = mixed(10, seed=6)
    want = answers(asked, spec="none")
    good, calls = getattr(HeadDrafter, method), itertools.count(1)

    def sometimes(self, *given):
        if next(calls) % 3 == 0:
            raise RuntimeError("no")
        return good(self, *given)

    monkeypatch.setattr(HeadDrafter, method, sometimes)
    found = answers(asked, spec="eagle3", max_num_seqs=5, token_budget=40)
    assert_same(found, want)
    assert found.drafting.failures[0] > 3 and found.stats.drafts[0].accepted > 10
