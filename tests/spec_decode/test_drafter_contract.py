"""Tests the rules for all drafters: which rows get drafts, how many, and which state a drafter drops."""

import numpy as np
import pytest

from mmengine.request import GrammarRequest, Request, SamplingParams
from mmengine.spec_decode.grammar import GrammarDrafter
from mmengine.spec_decode.registry import DRAFTERS
from mmengine.spec_decode.suffix import SuffixDrafter
from mmengine.spec_decode.texts import Texts

ROWS, WIDTH, VOCAB = 6, 200, 5


def of_grammars(texts):
    """Return a grammar drafter whose grammar forces the endless tokens 0 1 2 3 4 0 1 …"""

    def forced(row, most):
        said = texts.tokens[row, texts.num_prompt[row] : texts.lengths[row]].tolist()
        whole = [place % VOCAB for place in range(len(said) + min(most, 20))]
        return whole[len(said) :] if whole[: len(said)] == said else []

    return GrammarDrafter(forced)


MAKERS = {
    "grammar": of_grammars,
    **{name: lambda texts, name=name: DRAFTERS.load(name)(ROWS) for name in DRAFTERS.names()},
    "suffix": lambda texts: SuffixDrafter(ROWS, ring_bits=10, table_bits=10),
}


class Rows:
    """The drafter under test, and rows with cyclic texts. All drafters can continue cyclic texts."""

    def __init__(self, make):
        self.texts = Texts(ROWS, WIDTH)
        self.drafter = make(self.texts)
        self.rng = np.random.default_rng(4)

    def admit(self, row, num_said=0, num_prompt=12):
        self.drafter.leave(row, self.texts)
        tokens = np.append(np.arange(num_prompt) % VOCAB, np.arange(num_said) % VOCAB).astype(np.int32)
        request = Request(
            f"{row}", tokens[:num_prompt], SamplingParams(), grammar=GrammarRequest("regex", "given")
        )
        self.texts.admit(row, tokens, num_prompt)
        assert self.drafter.admit(row, request, self.texts) is True

    def say(self, rows, counts):
        said = [
            (np.arange(count) + self.texts.lengths[row] - self.texts.num_prompt[row]) % VOCAB
            for row, count in zip(rows, counts)
        ]
        self.texts.append(np.array(rows, np.intp), np.concatenate(said).astype(np.int32), np.array(counts))

    def propose(self, rows, most):
        """Return drafts for each of `rows`. Checks shapes, dtypes and limits."""
        rows, most = np.array(rows, np.intp), np.array(most, np.intp)
        proposed = self.drafter.propose(rows, self.texts, most)
        if proposed is None:
            return [[] for _ in rows]
        counts, token_ids = proposed.counts, proposed.token_ids
        assert counts.shape == rows.shape and (counts >= 0).all() and (counts <= most).all()
        assert counts.dtype.kind == token_ids.dtype.kind == "i"
        assert token_ids.shape == (counts.sum(),)
        assert (token_ids >= 0).all() and (token_ids < VOCAB).all()
        ends = np.cumsum(counts)
        return [token_ids[end - count : end].tolist() for end, count in zip(ends, counts)]


def held(value):
    """Return an object's approximate size: the bytes in its arrays plus the number of other values."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, dict):
        return sum(held(each) for pair in value.items() for each in pair)
    if isinstance(value, (list, tuple, set)):
        return sum(map(held, value))
    names = getattr(value, "__slots__", None) or getattr(value, "__dict__", ())
    return 1 if callable(value) else 1 + sum(held(getattr(value, name)) for name in names)


@pytest.fixture(params=MAKERS)
def rows(request):
    bench = Rows(MAKERS[request.param])
    for row in range(ROWS):  # An earlier answer, which some drafters search.
        bench.admit(row, num_said=40)
    for row in range(ROWS):
        bench.admit(row)
    return bench


def check(bench, rows, most):
    """Check that the drafts of each row are correct, and that each row with a limit above 0 has drafts."""
    for row, room, found in zip(rows, most, bench.propose(rows, most), strict=True):
        said = int(bench.texts.lengths[row] - bench.texts.num_prompt[row])
        assert found == [(said + n) % VOCAB for n in range(len(found))]
        assert bool(found) == bool(room)


def test_repeated_text_is_proposed_up_to_the_limit(rows):
    rows.say(range(ROWS), [11] * ROWS)
    for most in (1, 3, 8):
        check(rows, range(ROWS), [most] * ROWS)


def test_rows_may_have_different_room_and_none(rows):
    # Rows may have different draft limits, and a limit of 0.
    rows.say(range(ROWS), [11, 12, 13, 14, 15, 16])
    check(rows, [1, 3, 5], [0, 8, 2])
    check(rows, [0, 2], [0, 0])


def test_proposals_repeat(rows):
    rows.say(range(ROWS), [11] * ROWS)
    first = rows.propose(range(ROWS), [5] * ROWS)
    assert rows.propose(range(ROWS), [5] * ROWS) == first
    assert [rows.propose([row], [5])[0] for row in range(ROWS)] == first, "alone or beside others"


def test_equal_histories_give_equal_proposals(rows, request):
    name = request.node.callspec.params["rows"]
    other = Rows(MAKERS[name])
    for bench in (rows, other):
        bench.rng = np.random.default_rng(9)
    for row in range(ROWS):
        other.admit(row, num_said=40)
    for row in range(ROWS):
        other.admit(row)
    for turn in range(12):
        asked = sorted(rows.rng.choice(ROWS, rows.rng.integers(1, ROWS), replace=False).tolist())
        other.rng.bit_generator.state = rows.rng.bit_generator.state
        counts = rows.rng.integers(1, 9, len(asked)).tolist()
        most = rows.rng.integers(0, 9, len(asked)).tolist()
        for bench in (rows, other):
            bench.say(asked, counts)
        assert rows.propose(asked, most) == other.propose(asked, most)
        if turn % 4 == 3:
            for bench in (rows, other):
                bench.admit(asked[0])


def test_rows_without_proposals_for_some_steps_catch_up(rows):
    for _ in range(9):
        rows.say([0, 4], [3, 2])
        rows.propose([4], [2])
    check(rows, [0], [4])


def test_a_reused_row_forgets_the_previous_request(rows):
    rows.say([2], [30])
    rows.drafter.leave(2, rows.texts)
    prompt = np.array([4, 2, 0, 1, 2], np.int32)  # 0 1 2 occurs in the previous request
    rows.texts.admit(2, prompt, 4)
    assert rows.drafter.admit(
        2, Request("new", prompt[:4], SamplingParams(), grammar=GrammarRequest("regex", "given")), rows.texts
    )
    assert rows.propose([2], [8]) == [[]]


def test_a_row_may_leave_twice_or_before_its_first_request():
    for make in MAKERS.values():
        bench = Rows(make)
        for _ in range(2):
            bench.drafter.leave(3, bench.texts)
        bench.admit(3, num_said=20)
        bench.propose([3], [4])
        for _ in range(2):
            bench.drafter.leave(3, bench.texts)


def test_a_preempted_request_continues_with_its_output(rows):
    rows.admit(5, num_said=23)
    check(rows, [5], [6])


def test_texts_and_arguments_stay_unchanged(rows):
    rows.say(range(ROWS), [11] * ROWS)
    asked, most = np.arange(ROWS), np.full(ROWS, 5)
    before = rows.texts.tokens.copy(), rows.texts.lengths.copy()
    rows.drafter.propose(asked, rows.texts, most)
    assert asked.tolist() == list(range(ROWS)) and most.tolist() == [5] * ROWS
    assert (rows.texts.tokens == before[0]).all() and (rows.texts.lengths == before[1]).all()


def test_memory_does_not_grow_with_the_number_of_requests(rows):
    def turn(count):
        for number in range(count):
            row = number % ROWS
            rows.admit(row)
            for _ in range(3):
                rows.say([row], [7])
                rows.propose([row], [8])

    turn(120)
    before = held(rows.drafter)
    turn(1000)
    assert held(rows.drafter) <= before
