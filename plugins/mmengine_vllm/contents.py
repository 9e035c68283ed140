"""Token ids as the log holds them: pseudo ids, or the ids themselves.

A pseudo id is 31 bits of a keyed hash over a request's tokens up to that token. Two requests therefore have
the same pseudo ids for exactly as long as their tokens are equal, prompts and outputs alike, and prefix hits
can be derived again. The key is random, stays in this process and is never written, so tokens cannot be
computed from a log.
"""

import hashlib
import os

import numpy as np

ONE = np.uint64(1)
_SEEDS = 8  # bytes at the front of the key stream that are not weights, in 8-byte words


class PseudoIds:
    """Hashes the token ids of all rows. `num_rows`, `max_tokens`: the largest row number plus 1, and the most
    tokens of one request, drafts included.

    The hash is a sum of tokens times secret weights, one weight for each position, which a keyed function
    mixes. `sums` and `lengths` hold the sum and the number of tokens of each row.
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

    def begin(self, prompt: list[int], salt: str) -> tuple[np.ndarray, tuple[int, int]]:
        """Return what `ids` takes for a prompt, and the state of its chain. Prompts with different salts
        share no id.
        """
        start = int.from_bytes(self.digest(salt)[:8], "little") if salt else 0
        sums = np.array(prompt, np.uint64)
        sums += ONE
        sums *= self._weights[: len(prompt)]
        np.cumsum(sums, out=sums)
        sums += np.uint64(start)
        return sums, (int(sums[-1]), len(prompt))

    def admit(self, row: int, chain: tuple[int, int]) -> None:
        """Give a request's chain to a row."""
        self.sums[row], self.lengths[row] = chain

    def leave(self, row: int) -> tuple[int, int]:
        """Return the chain of a row that loses its request."""
        return int(self.sums[row]), int(self.lengths[row])

    def one_each(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Append one token to each of `rows` (intp, distinct). Returns what `ids` takes, uint64 [n]."""
        sums = np.array(tokens, np.uint64)
        places = self.lengths[rows]
        sums += ONE
        sums *= self._weights[places]
        sums += self.sums[rows]
        self.sums[rows] = sums
        places += 1
        self.lengths[rows] = places
        return sums

    def runs(
        self, rows: np.ndarray, tokens: list[int] | np.ndarray, counts: np.ndarray, *, keep: bool
    ) -> np.ndarray:
        """Append `counts` tokens to each of `rows`, whose tokens follow each other in `tokens`. With `keep`
        False the rows' chains stay as they are, as for drafts. Returns what `ids` takes.
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
        """Return the pseudo ids, int32, for what `begin`, `one_each` and `runs` returned."""
        mixed = sums + self._offset
        for factor in (self._first, self._second):
            mixed ^= mixed >> np.uint64(32)
            mixed *= factor
        return (mixed >> np.uint64(33)).astype(np.int32)


class TokenIds(PseudoIds):
    """Writes token ids as they are. Texts are hashed without a key: equal in the logs of all processes."""

    def __init__(self) -> None:
        pass

    def digest(self, text: str) -> bytes:
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()

    def begin(self, prompt: list[int], salt: str) -> tuple[np.ndarray, tuple[int, int]]:
        return np.array(prompt, np.int32), (0, 0)

    def admit(self, row: int, chain: tuple[int, int]) -> None:
        """Do nothing: the ids do not depend on earlier tokens."""

    def leave(self, row: int) -> tuple[int, int]:
        return 0, 0

    def one_each(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        return np.array(tokens, np.int32)

    def runs(
        self, rows: np.ndarray, tokens: list[int] | np.ndarray, counts: np.ndarray, *, keep: bool
    ) -> np.ndarray:
        return np.array(tokens, np.int32)

    def ids(self, sums: np.ndarray) -> np.ndarray:
        return sums
