"""The interface that a grammar engine implements, as llguidance/backend.py does."""

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
    """A compiled grammar, which any texts may share."""

    after: tuple[int, ...]  # The text begins after these tokens; () if it begins at once.
    # Minimum token budget of a text that must be completed within its budget; 0 if completion is off.
    shortest: int

    def matcher(self) -> Matcher:
        """Return a new matcher at the beginning."""

    def renew(self, error: str) -> Matcher | None:
        """Return a new matcher if `error`, a matcher's error, says that the grammar's matchers have used up a
        shared resource; None for any other error.
        """

    def closer(self, budget: int, reserve: int = 0) -> Closer | None:
        """Return a closer for a text of at most `budget` tokens, at its beginning; None if completion is off.
        Up to `reserve` tokens of the budget are kept for the completion after a stop string.
        """


class Backend(Protocol):
    eos_token_ids: Sequence[int]

    @property
    def vocab_size(self) -> int:
        """The number of tokens that masks have a bit for."""

    def compile(self, grammar: GrammarRequest) -> Compiled:
        """Compile a grammar from spec.py. Worker threads call this, perhaps several at once. Raises
        InvalidRequest for a grammar that the engine does not support.
        """

    def notes(self, grammar: GrammarRequest) -> tuple[Note, ...]:
        """Return notes for the client on the parts that the engine narrows."""

    def fill(
        self, matchers: Sequence[Matcher], bits: np.ndarray, drafts: Sequence[list[int]] | None = None
    ) -> None:
        """Set `bits`, uint32 [m, ceil(vocab_size / 32)], to the next tokens that each of m matchers allows:
        token t is bit t % 32 of word t // 32. An end of sequence is allowed exactly where the grammar
        accepts. If a matcher ends with an error meanwhile, its mask has no meaning.

        With `drafts`, each matcher has an additional mask for each of its drafts, in order: the tokens
        allowed after that draft. After a draft that is not allowed, the masks keep their old contents. The
        matchers themselves do not advance.
        """

    def allows(self, matcher: Matcher, token_id: int) -> bool:
        """Return whether `fill` would set the token's bit, at a much lower cost."""

    def take(self, matcher: Matcher, token_id: int, last: int) -> bool:
        """Consume a token, which is not an end of sequence, if `fill` would set its bit; otherwise change
        nothing. `last` is the previous token (-1: none).
        """

    def forced(self, matcher: Matcher, last: int) -> list[int]:
        """Return the matcher's forced tokens (`compute_ff_tokens`) after the token `last` (-1: none). If a
        grammar leaves several spellings, there may be more tokens than `compute_ff_tokens` returns.
        """

    def advance(self, matchers: Sequence[Matcher], token_ids: Sequence[int]) -> None:
        """Advance each matcher by its token. A matcher that refuses its token is in an error state from then
        on.
        """

    def cut(self, token_ids: Sequence[int], behind: str) -> list[int] | None:
        """Return tokens that spell the text of `token_ids` before its last `behind`, after which only a
        partial character may follow. None if no tokens spell that text.
        """


class OfTokenizer:
    """The base class for grammar engines, built from a tokenizer.

    `token_bytes` returns each token's bytes (b"" for a special token); the function is called once, for the
    first grammar. `encode` converts text to tokens. `special_ids` are the special tokens, which stand for no
    text. A token at or beyond the end of `token_bytes` is never allowed; a model's vocabulary is often wider.
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
        self._lock = threading.Lock()  # Guards objects that are created for the first grammar.

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def notes(self, grammar: GrammarRequest) -> tuple[Note, ...]:
        """Return no notes: the engine narrows nothing."""
        return ()

    def cut(self, token_ids: Sequence[int], behind: str) -> list[int] | None:
        """Implement Backend.cut. If `behind` begins within a token, the token's bytes before it become
        single-byte tokens.
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
        """Return tokens whose bytes are the text's. The first call needs all tokens' bytes."""
        if self._exact is None:
            self._exact = ExactEncoder(self._given_encode, self._texts(self._tokens_in_vocabulary()))
        return self._exact(text)

    def _padded_tokens(self) -> list[bytes]:
        tokens = self._tokens_in_vocabulary()
        return tokens + [b""] * (self._vocab_size - len(tokens))

    def _tokens_in_vocabulary(self) -> list[bytes]:
        return list(self._token_bytes())[: self._vocab_size]

    def _texts(self, tokens: Sequence[bytes]) -> list[bytes]:
        """Return `tokens` with b"" for special tokens."""
        return [b"" if token in self._special_ids else text for token, text in enumerate(tokens)]
