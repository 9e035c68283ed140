"""The interface that a grammar engine implements, and a base class for engines that are built from a
tokenizer. llguidance/backend.py is an implementation.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from mmengine.request import GrammarRequest
from mmengine.structured_output.closing.closer import Closer
from mmengine.structured_output.closing.search import Vocabulary
from mmengine.structured_output.engines.exact_encoder import ExactEncoder
from mmengine.structured_output.json_schema.vocabulary.notes import Note
from mmengine.structured_output.matcher import Matcher


class Compiled(Protocol):
    """A compiled grammar. Any number of texts may share it."""

    after: tuple[int, ...]  # The grammar applies after these tokens; () if it applies from the first token.
    # Number of tokens in `after` and in the grammar's shortest text; 0 if completion (closing a truncated
    # answer) is off.
    shortest: int

    def matcher(self) -> Matcher:
        """Return a new matcher at the text's beginning."""

    def renew(self, error: str) -> Matcher | None:
        """Return a new matcher if a matcher's `error` reports that a shared resource is used up. Otherwise
        return None.
        """

    def closer(self, budget: int, reserve: int = 0) -> Closer | None:
        """Return a Closer for a new text with at most `budget` tokens, or None if completion is off.

        The budget's last `reserve` tokens, or fewer, can only complete a text that a stop string cut off.
        """


class Backend(Protocol):
    eos_token_ids: Sequence[int]

    @property
    def vocab_size(self) -> int:
        """The number of tokens for which a mask has a bit."""

    def compile(self, grammar: GrammarRequest) -> Compiled:
        """Compile a grammar. Several worker threads may call this concurrently.

        `grammar` was made by structured_output/request/spec.py. Raises InvalidRequest for a grammar that the
        engine does not support.
        """

    def notes(self, grammar: GrammarRequest) -> tuple[Note, ...]:
        """Return notes for the client about allowed values that the engine cannot produce."""

    def fill(
        self, matchers: Sequence[Matcher], bits: np.ndarray, drafts: Sequence[list[int]] | None = None
    ) -> None:
        """Write a token mask for each matcher into `bits`, uint32 [m, ceil(vocab_size / 32)].

        Token t is bit t % 32 in word t // 32; a set bit means that the token may come next. An
        end-of-sequence token is allowed exactly where the text may end. If a matcher has an error afterwards,
        its mask has no meaning.

        With `drafts`, each matcher's mask is followed by a mask for each draft token, with the tokens that
        may come next. Masks after a forbidden draft token are not written. The matchers do not advance.
        """

    def allows(self, matcher: Matcher, token_id: int) -> bool:
        """Return whether `fill` would set the token's bit. The call is much faster than writing a mask."""

    def take(self, matcher: Matcher, token_id: int, last: int) -> bool:
        """Consume a token if `fill` would set its bit, and return whether it was consumed.

        The token must not be an end of sequence. `last` is the previous token (-1: none).
        """

    def forced(self, matcher: Matcher, last: int) -> list[int]:
        """Return the tokens that must come next after the token `last` (-1: none).

        May return more tokens than llguidance's `compute_ff_tokens` if several tokenizations are possible.
        """

    def advance(self, matchers: Sequence[Matcher], token_ids: Sequence[int]) -> None:
        """Advance each matcher by its token. A matcher that does not allow its token has an
        error afterwards.
        """

    def cut(self, token_ids: Sequence[int], behind: str) -> list[int] | None:
        """Return tokens for the text of `token_ids` without its end `behind`, which a stop string cut off.

        After `behind`, `token_ids` may still have the bytes of an incomplete character. Returns None if the
        text does not contain `behind`, or if no tokens have the shorter text.
        """


class OfTokenizer:
    """The base class for grammar engines that are built from a tokenizer.

    `token_bytes` returns each token's bytes (b"" for a special token), and is first called when a grammar is
    compiled. `encode` converts text to tokens. `special_ids` has the special tokens, which have no text. The
    model's vocabulary may be larger than the tokenizer's; the additional tokens are never allowed.
    """

    def __init__(
        self,
        token_bytes: Callable[[], Sequence[bytes]],
        encode: Callable[[str], list[int]],
        special_ids: frozenset[int],
        eos_token_ids: Sequence[int],
        vocab_size: int,
    ):
        self._token_bytes, self._given_encode = token_bytes, encode
        self._exact: ExactEncoder | None = None
        self._special_ids, self.eos_token_ids = special_ids, list(eos_token_ids)
        self._vocab_size = vocab_size
        self._vocabulary: Vocabulary | None = None
        self._lock = threading.Lock()  # Guards the objects that are created for the first grammar.

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def notes(self, grammar: GrammarRequest) -> tuple[Note, ...]:
        """Return no notes, because the engine allows all values that the grammar allows."""
        return ()

    def cut(self, token_ids: Sequence[int], behind: str) -> list[int] | None:
        """Implement Backend.cut.

        If `behind` begins within a token, the token's earlier bytes become single-byte tokens.
        """
        words = self._words()
        place = words.text(token_ids).rfind(behind.encode())
        if place < 0:
            return None
        kept, size = list[int](), 0
        for token in token_ids:
            text = words.token_bytes[token]
            if size + len(text) > place:
                rest = words.letters(text[: place - size])
                return None if rest is None else kept + rest
            kept.append(token)
            size += len(text)
        return kept

    def _words(self) -> Vocabulary:
        with self._lock:
            if self._vocabulary is None:
                texts = self._texts(self._padded_tokens())
                self._vocabulary = Vocabulary(texts, self._special_ids, self._encode)
            return self._vocabulary

    def _encode(self, text: str) -> list[int]:
        """Return tokens whose bytes are exactly the text's bytes."""
        if self._exact is None:
            self._exact = ExactEncoder(self._given_encode, self._texts(self._tokens_in_vocabulary()))
        return self._exact(text)

    def _padded_tokens(self) -> list[bytes]:
        tokens = self._tokens_in_vocabulary()
        return tokens + [b""] * (self._vocab_size - len(tokens))

    def _tokens_in_vocabulary(self) -> list[bytes]:
        return list(self._token_bytes())[: self._vocab_size]

    def _texts(self, tokens: Sequence[bytes]) -> list[bytes]:
        """Return `tokens` after replacing special tokens by b""."""
        return [b"" if token in self._special_ids else text for token, text in enumerate(tokens)]
