"""Tests that the n-gram and suffix drafters, which look n-grams up in an index, find the same drafts as a
loop over the whole text.
"""

import random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mmengine.request import Request, SamplingParams
from mmengine.spec_decode import ngram, suffix
from mmengine.spec_decode.index import NOWHERE, GramIndex
from mmengine.spec_decode.ngram import NgramDrafter
from mmengine.spec_decode.suffix import SuffixDrafter
from mmengine.spec_decode.texts import Texts

ROWS, WIDTH = 4, 80
TOKENS = st.integers(0, 3)  # few, so that they repeat


def request_of(prompt, salt=""):
    return Request("r", np.array(prompt, np.int32), SamplingParams(), cache_salt=salt)


class Rows:
    """Applies random admissions, tokens and proposals to a drafter. `known` holds the rows' tokens as
    lists.
    """

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.texts, self.drafter = Texts(ROWS, WIDTH), self.make()
        self.known, self.num_prompt, self.salts = {}, {}, {}
        self.num_found = 0

    def run(self, turns):
        for _ in range(turns):
            self.rng.choice((self.admit, self.say, self.say, self.propose, self.propose))()

    def tokens(self, low, high):
        """Return tokens between 0 and 4, mostly in cyclic order, so that n-grams repeat."""
        first = self.rng.randrange(5)
        run = [(first + n) % 5 for n in range(self.rng.randint(low, high))]
        return [token if self.rng.random() < 0.9 else self.rng.randrange(5) for token in run]

    def admit(self):
        row, salt = self.rng.randrange(ROWS), self.rng.choice(["", "", "a"])
        prompt, said = self.tokens(1, 20), self.tokens(0, 10)
        self.drafter.leave(row, self.texts)
        self.left(row)
        tokens = [*prompt, *said]
        self.texts.admit(row, np.array(tokens, np.int32), len(prompt))
        assert self.drafter.admit(row, request_of(prompt, salt), self.texts)
        self.known[row], self.num_prompt[row], self.salts[row] = tokens, len(prompt), salt

    def say(self):
        rows = [
            row for row, known in self.known.items() if len(known) < WIDTH - 9 and self.rng.random() < 0.7
        ]
        said = [self.tokens(1, 9) for _ in rows]
        flat = np.array([token for each in said for token in each], np.int32)
        self.texts.append(np.array(rows, np.intp), flat, np.array([len(each) for each in said], np.int64))
        for row, tokens in zip(rows, said):
            self.known[row] += tokens
        for row, tokens in self.known.items():
            assert self.texts.tokens[row, : self.texts.lengths[row]].tolist() == tokens

    def propose(self):
        rows = [row for row in self.known if self.rng.random() < 0.7]
        if not rows:
            return
        most = [self.rng.randint(0, 8) for _ in rows]
        proposed = self.drafter.propose(np.array(rows, np.intp), self.texts, np.array(most, np.intp))
        want = [self.expected(row, room) for row, room in zip(rows, most)]
        self.num_found += sum(map(bool, want))
        if proposed is None:
            assert not any(want)
            return
        ends = np.cumsum(proposed.counts)
        found = [
            proposed.token_ids[end - count : end].tolist()
            for end, count in zip(ends, proposed.counts.tolist())
        ]
        assert found == want

    def left(self, row):
        pass


class NgramRows(Rows):
    make = staticmethod(lambda: NgramDrafter(ROWS))

    def expected(self, row, room):
        text = self.known[row]
        for size in ngram.SIZES:
            for end in range(len(text) - 1, size - 1, -1):  # ends (exclusive) of earlier n-grams
                if room and len(text) > size and text[end - size : end] == text[-size:]:
                    ahead = text[end:]
                    return [ahead[n % len(ahead)] for n in range(room)]
        return []


class SuffixRows(Rows):
    ring_bits = 7
    make = staticmethod(lambda: SuffixDrafter(ROWS, ring_bits=SuffixRows.ring_bits, table_bits=16))

    def __init__(self, seed):
        super().__init__(seed)
        self.ring = []  # (token, salt) of all past tokens; an END after each answer

    def left(self, row):
        if row in self.known:
            size = 1 << self.ring_bits
            answer = self.known.pop(row)[self.num_prompt[row] :][-(size // 4) :]
            self.ring += [(token, self.salts[row]) for token in (*answer, suffix.END)]

    def expected(self, row, room):
        said = self.known[row][self.num_prompt[row] :]
        size = 1 << self.ring_bits
        oldest = len(self.ring) - size
        for length in suffix.SIZES:
            gram = [(token, self.salts[row]) for token in said[-length:]]
            if len(said) < length or not room:
                continue
            for end in range(len(self.ring), length - 1, -1):
                if self.ring[end - length : end] == gram:
                    if end - 1 - length < oldest:  # overwritten, or preceded by an overwritten token
                        break
                    ahead = [token for token, _ in self.ring[end : end + room]]
                    return ahead[: ahead.index(suffix.END)] if suffix.END in ahead else ahead
        return []


@pytest.mark.parametrize("kind", [NgramRows, SuffixRows])
def test_drafts_equal_a_loop_over_the_text(kind):
    found = 0
    for seed in range(60):
        rows = kind(seed)
        rows.run(120)
        found += rows.num_found
    assert found > 1000


@example([[2, 1, 1], [2, 2, 2]], 160185062)  # Both n-grams have the same hash.
@given(st.lists(st.lists(TOKENS, min_size=3, max_size=3), max_size=30), st.integers(0, 2**64 - 1))
def test_an_index_returns_the_latest_entry(grams, salt):
    index = GramIndex(3, 16, num_tables=2)
    hashes = index.hashes(np.array(grams, np.int32).reshape(-1, 3), salt)
    assert all(0 <= each < 1 << 16 for each in hashes.tolist())
    last = {}
    for place, at in enumerate(hashes.tolist()):
        index.put(1, np.array([at]), np.array([place]))
        last[at] = place
    assert index.get(1, hashes).tolist() == [last[at] for at in hashes.tolist()]
    assert (index.get(0, hashes) == NOWHERE).all()
    index.clear(1)
    assert (index.get(1, hashes) == NOWHERE).all()


def test_a_salt_gives_other_hashes():
    grams = np.arange(30, dtype=np.int32).reshape(10, 3)
    index = GramIndex(3, 16)
    one, other = index.hashes(grams, 1), index.hashes(grams, np.full(10, 2, np.uint64))
    assert (one != other).all() and (one == index.hashes(grams, np.full(10, 1, np.uint64))).all()


def said_and_left(drafter, texts, row, tokens, salt):
    drafter.leave(row, texts)
    texts.admit(row, np.array([0, *tokens], np.int32), 1)
    drafter.admit(row, request_of([0], salt), texts)


@pytest.mark.parametrize("asker", ["mine", "yours", ""])
def test_answers_are_hidden_from_requests_with_another_salt(asker):
    texts, drafter = Texts(2, WIDTH), SuffixDrafter(2)
    answer = list(range(40, 60))
    said_and_left(drafter, texts, 0, answer, "mine")
    said_and_left(drafter, texts, 0, [], "")
    said_and_left(drafter, texts, 1, answer[:12], asker)
    proposed = drafter.propose(np.array([1]), texts, np.array([5]))
    assert (proposed is None) if asker != "mine" else (proposed.token_ids.tolist() == answer[12:17])


def test_hash_collisions_with_other_tokens_give_no_draft(monkeypatch):
    monkeypatch.setattr(GramIndex, "hashes", lambda self, grams, salt=0: np.zeros(len(grams), np.intp))
    texts, row = Texts(1, WIDTH), np.array([0])
    ahead, past = NgramDrafter(1), SuffixDrafter(1)
    said_and_left(past, texts, 0, list(range(30)), "")
    for drafter in (ahead, past):
        said_and_left(drafter, texts, 0, [1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 8, 1, 2, 3], "")
        assert drafter.propose(row, texts, np.array([4])) is None


def test_hash_collisions_with_another_salt_give_no_draft(monkeypatch):
    monkeypatch.setattr(GramIndex, "hashes", lambda self, grams, salt=0: np.zeros(len(grams), np.intp))
    for asker, want in (("yours", None), ("mine", [13])):
        texts, drafter = Texts(2, WIDTH), SuffixDrafter(2)
        monkeypatch.setattr(drafter, "_indices", drafter._indices[-1:])
        said_and_left(drafter, texts, 0, [10, 11, 12], "mine")
        ring = drafter._ring
        said_and_left(drafter, texts, 0, [], "mine")
        ring[3] = 13  # so that a token follows the only n-gram
        said_and_left(drafter, texts, 1, [10, 11, 12], asker)
        proposed = drafter.propose(np.array([1]), texts, np.array([1]))
        assert want is None and proposed is None or proposed.token_ids.tolist() == want


def test_overwritten_answers_are_forgotten():
    texts, drafter = Texts(2, WIDTH), SuffixDrafter(2, ring_bits=7)
    answer, found = list(range(100, 120)), []
    said_and_left(drafter, texts, 0, answer, "")
    drafter.admit(1, request_of([0]), texts)
    for turn in range(7):
        said_and_left(drafter, texts, 0, range(200 + 20 * turn, 220 + 20 * turn), "")
        texts.admit(1, np.array([0, *answer[:6]], np.int32), 1)
        found.append(drafter.propose(np.array([1]), texts, np.array([3])))
    assert found[0].token_ids.tolist() == answer[6:9] and found[-1] is None


def test_an_answer_longer_than_a_quarter_of_the_ring_is_kept_from_its_end():
    """The ring has 64 tokens, and stores only the last 16 tokens of an answer."""
    texts, drafter = Texts(2, WIDTH), SuffixDrafter(2, ring_bits=6)
    said_and_left(drafter, texts, 0, range(200, 240), "")
    said_and_left(drafter, texts, 0, [], "")
    for said, want in (([205, 206, 207], None), ([230, 231, 232], [233, 234])):
        said_and_left(drafter, texts, 1, said, "")
        proposed = drafter.propose(np.array([1]), texts, np.array([2]))
        assert want is None and proposed is None or proposed.token_ids.tolist() == want
