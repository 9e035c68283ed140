"""Drafts where a grammar leaves no choice: keys, punctuation, the rest of a word.

One legal token is rare, because a string can be spelled with many; but the string itself is often forced.
Its tokens, as the tokenizer would spell it, are drafts; the last of them is held back, for it might be
spelled together with what comes next.

JSON leaves one choice nearly everywhere, that of white space. So the drafter follows not the grammar itself
but sketches of it, in which white space is fixed in one of the usual ways, until the row departs from them.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from mmengine.request import Request
from mmengine.spec_decode.base import Proposed
from mmengine.spec_decode.texts import Texts


class Follower(Protocol):
    """A matcher of structured_output/base.py, as far as a drafter needs it."""

    def try_consume_tokens(self, token_ids: list[int]) -> int: ...

    def compute_ff_bytes(self) -> bytes: ...

    def compute_ff_tokens(self) -> list[int]: ...


MAX_KEPT, MAX_KEPT_BYTES = 8192, 256  # texts whose tokens are kept, and their length

Sketches = Sequence[Callable[[], Follower]]  # new followers at the beginning, the likeliest first


class _Row:
    """A row with a grammar: who has it, and the sketch that it followed so far."""

    __slots__ = ("request", "follower", "num_followed", "next_sketch")

    def __init__(self, request: Request):
        self.request = request
        self.follower: Follower | None = None
        self.num_followed = 0  # tokens that the follower has seen
        self.next_sketch = 0  # to be tried when the row departs from this one


class GrammarDrafter:
    """`said_of`: all tokens that a row has said in its grammar, None before that began. `sketches_of`: those
    of a request, None while they are being compiled. `allow` is told what a row may say: a sketch forces
    nothing that its grammar's masks exclude."""

    name = "grammar"

    def __init__(
        self,
        said_of: Callable[[int], list[int] | None],
        sketches_of: Callable[[Request], Sketches | None],
        allow: Callable[[int, Sequence[int]], None],
    ):
        self._said_of, self._sketches_of, self._allow = said_of, sketches_of, allow
        self._spellings: dict[tuple[int, bytes], Sequence[int]] = {}
        self._rows: dict[int, _Row] = {}

    def admit(self, row: int, request: Request, texts: Texts) -> bool:
        if request.grammar is None:
            return False
        self._rows[row] = _Row(request)
        return True

    def leave(self, row: int, texts: Texts) -> None:
        self._rows.pop(row, None)

    def propose(self, rows: np.ndarray, texts: Texts, most: np.ndarray) -> Proposed | None:
        drafts = [self._of(row, room) for row, room in zip(rows.tolist(), most.tolist(), strict=True)]
        flat = [token for each in drafts for token in each]
        if not flat:
            return None
        return Proposed(np.array(flat, np.int32), np.array([len(each) for each in drafts], np.intp))

    def _of(self, row: int, room: int) -> Sequence[int]:
        known = self._rows[row]
        said = self._said_of(row) if room else None
        if said is None or not self._follow(known, said):
            return ()
        drafts = self._spelled(known.follower, said[-1] if said else -1)[:room]
        if drafts:
            self._allow(row, drafts)
        return drafts

    def _spelled(self, follower: Follower, last: int) -> Sequence[int]:
        """The tokens of what is forced behind the token `last`; mostly the same few texts are."""
        text = follower.compute_ff_bytes()
        if not text:
            return ()
        tokens = self._spellings.get((last, text))
        if tokens is None:
            tokens = follower.compute_ff_tokens()
            if len(text) <= MAX_KEPT_BYTES and len(self._spellings) < MAX_KEPT:
                self._spellings[last, text] = tokens
        return tokens

    def _follow(self, known: _Row, said: list[int]) -> bool:
        """Bring the row's sketch up to date, or take the next one that fits all it said."""
        while True:
            if known.follower is not None:
                ahead = said[known.num_followed :]
                known.num_followed = len(said)
                if known.follower.try_consume_tokens(ahead) == len(ahead):
                    return True
                known.follower = None
            sketches = self._sketches_of(known.request)
            if sketches is None or known.next_sketch >= len(sketches):
                return False
            known.follower, known.num_followed = sketches[known.next_sketch](), 0
            known.next_sketch += 1
