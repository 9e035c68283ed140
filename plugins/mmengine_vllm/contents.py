"""Converts token ids to the ids in a log: pseudo ids, or the token ids themselves.

A token's pseudo id is 31 bits of a keyed hash. The hash covers the request's tokens up to and including this
token. Two requests with a common prefix therefore have equal pseudo ids in the prefix, and a replay can
derive prefix hits. The key is random and never written, so a log does not reveal tokens.
"""

import hashlib
import os

import numpy as np

ONE = np.uint64(1)
_ONES, _ONE_PLACE = np.ones(1, np.uint64), np.ones(1, np.intp)
_SEEDS = 8  # number of 8-byte words that precede the weights in the key stream


class PseudoIds:
    """Hashes all rows' token ids. `num_rows`: the largest row number plus 1. `max_tokens`: maximum
    number of tokens of a request, including drafts.

    The hash is a sum over all tokens: token id times the position's secret weight. A keyed function mixes the
    sum. `sums` and `lengths` contain each row's sum and number of tokens.
    """

    def __init__(self, num_rows: int, max_tokens: int, key: bytes = b""):
        self._key = key or os.urandom(32)
        words = np.frombuffer(hashlib.shake_256(self._key).digest(8 * (max_tokens + _SEEDS)), np.uint64)
        self._offset, self._first, self._second = words[0], words[1] | ONE, words[2] | ONE
        self._weights = words[_SEEDS:]
        self.sums = np.zeros(num_rows, np.uint64)
        self.lengths = np.zeros(num_rows, np.intp)

    def digest(self, text: str) -> bytes:
        """Return a keyed hash of a text, 32 bytes."""
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), key=self._key, digest_size=32).digest()

    def begin(self, prompt: bytes, salt: str) -> tuple[np.ndarray, tuple[int, int]]:
        """Return a prompt's sums (the argument for `ids`), and the prompt's chain (hash state).
        `prompt`: int64 as bytes. Prompts with different salts share no id.
        """
        sums = np.frombuffer(prompt, np.uint64) + _ONES
        sums *= self._weights[: len(sums)]
        np.add.accumulate(sums, out=sums)
        if salt:
            sums += np.frombuffer(self.digest(salt)[:8], np.uint64)
        return sums, (int(sums[-1]), len(sums))

    def admit(self, row: int, chain: tuple[int, int]) -> None:
        """Assign a request's chain (hash state) to a row."""
        self.sums[row], self.lengths[row] = chain

    def leave(self, row: int) -> tuple[int, int]:
        """Return the chain of the request that leaves the row."""
        return int(self.sums[row]), int(self.lengths[row])

    def one_each(self, rows: np.ndarray, tokens: np.ndarray, order: np.ndarray | None = None) -> np.ndarray:
        """Append `tokens[i]` to row `order[i]` (intp, distinct; default `rows`). Return the rows' sums (the
        argument for `ids`) in the order of `rows`, uint64 [n].
        """
        written = rows if order is None else order
        sums = tokens.view(np.uint64) + _ONES  # faster than adding a scalar
        places = self.lengths[written]
        sums *= self._weights[places]
        sums += self.sums[written]
        self.sums[written] = sums
        places += _ONE_PLACE
        self.lengths[written] = places
        return sums if order is None else self.sums[rows]

    def runs(
        self, rows: np.ndarray, tokens: list[int] | np.ndarray, counts: np.ndarray, *, keep: bool
    ) -> np.ndarray:
        """Append `counts[i]` tokens to row `rows[i]`. `tokens` contains the tokens row by row. With `keep`
        False (for drafts), the rows' chains do not change. Returns the sums for `ids`.
        """
        owners = np.repeat(rows, counts)
        ends = np.cumsum(counts)
        within = np.arange(len(tokens)) - np.repeat(ends - counts, counts)
        sums = np.array(tokens, np.uint64)
        sums += ONE
        sums *= self._weights[self.lengths[owners] + within]
        np.cumsum(sums, out=sums)
        before = np.concatenate((np.zeros(1, np.uint64), sums))[ends - counts]
        sums += np.repeat(self.sums[rows] - before, counts)
        if keep:
            some = counts > 0
            self.sums[rows[some]] = sums[ends[some] - 1]
            self.lengths[rows] += counts
        return sums

    def ids(self, sums: np.ndarray) -> np.ndarray:
        """Return the pseudo ids, int32, for sums that `begin`, `one_each` and `runs` returned."""
        mixed = sums + self._offset
        for factor in (self._first, self._second):
            mixed ^= mixed >> np.uint64(32)
            mixed *= factor
        return (mixed >> np.uint64(33)).astype(np.int32)


class TokenIds(PseudoIds):
    """Writes token ids unchanged. Texts are hashed without a key, so equal texts have equal hashes in all
    logs.
    """

    def __init__(self) -> None:
        pass

    def digest(self, text: str) -> bytes:
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()

    def begin(self, prompt: bytes, salt: str) -> tuple[np.ndarray, tuple[int, int]]:
        return np.frombuffer(prompt, np.int64).astype(np.int32), (0, 0)

    def admit(self, row: int, chain: tuple[int, int]) -> None:
        """Do nothing, because the ids do not depend on earlier tokens."""

    def leave(self, row: int) -> tuple[int, int]:
        return 0, 0

    def one_each(self, rows: np.ndarray, tokens: np.ndarray, order: np.ndarray | None = None) -> np.ndarray:
        if order is not None:
            by_row = np.empty(rows.max() + 1, np.int32)
            by_row[order] = tokens
            return by_row[rows]
        return np.array(tokens, np.int32)

    def runs(
        self, rows: np.ndarray, tokens: list[int] | np.ndarray, counts: np.ndarray, *, keep: bool
    ) -> np.ndarray:
        return np.array(tokens, np.int32)

    def ids(self, sums: np.ndarray) -> np.ndarray:
        return sums
