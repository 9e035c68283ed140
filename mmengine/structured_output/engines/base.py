"""What a grammar engine brings: one file like llguidance/backend.py implements this."""

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from mmengine.request import GrammarRequest
from mmengine.structured_output.closing.closer import Closer
from mmengine.structured_output.closing.closing_search import Vocabulary
from mmengine.structured_output.json_schema.vocabulary.notes import Note
from mmengine.structured_output.matcher import Matcher


class Compiled(Protocol):
    """A grammar, ready for any number of texts."""

    after: tuple[int, ...]  # the text begins behind these tokens; (): at once
    shortest: int  # tokens that a text needs at least which is to be closed in its budget; 0 where it is not

    def matcher(self) -> Matcher:
        """A new one, at the beginning."""

    def renewed(self, error: str) -> Matcher | None:
        """The same behind a matcher's `error`, where the grammar engine keeps something that all matchers
        before have used up; None for another error."""

    def closer(self, budget: int, reserve: int = 0) -> Closer | None:
        """For a text of at most `budget` tokens, at its beginning; None where it is not to be closed.
        `reserve`: how many of them are kept for what completes it behind a stop string, if there are so many.
        """


class Backend(Protocol):
    eos_token_ids: Sequence[int]

    @property
    def vocab_size(self) -> int:
        """Tokens that masks have a bit for."""

    def compile(self, grammar: GrammarRequest) -> Compiled:
        """`grammar`: one of spec.py. Called on worker threads, perhaps on several at once. Raises
        InvalidRequest for one that it does not take."""

    def notes(self, grammar: GrammarRequest) -> tuple[Note, ...]:
        """Where it allows less than `grammar` says, for whoever asked for that."""

    def fill(
        self, matchers: Sequence[Matcher], bits: np.ndarray, drafts: Sequence[list[int]] | None = None
    ) -> None:
        """Set `bits`, uint32 [m, ceil(vocab_size / 32)], to what each of m matchers allows next: token t is
        bit t % 32 of word t // 32. An end of sequence is allowed exactly where the grammar accepts. What a
        matcher that breaks meanwhile allows means nothing.

        With `drafts`, each matcher has one mask more for each of its drafts, in order: what it allows
        after that draft. After a draft that it does not allow the masks are left as they were. The matchers
        themselves do not advance."""

    def allows(self, matcher: Matcher, token_id: int) -> bool:
        """Whether `fill` would set the token's bit, for far less."""

    def take(self, matcher: Matcher, token_id: int, last: int) -> bool:
        """Go on, behind the token `last` (-1: none), by a token that is no end of sequence if `fill` would
        set its bit; else nothing happens."""

    def forced(self, matcher: Matcher, last: int) -> list[int]:
        """The matcher's `compute_ff_tokens`, behind the token `last` (-1: none). The tokenizer spells so what
        is forced, but where a grammar leaves more than one spelling there may be more than
        `compute_ff_tokens` would give."""

    def advance(self, matchers: Sequence[Matcher], token_ids: Sequence[int]) -> None:
        """Each matcher goes on by its token; one that refuses it is broken."""

    def cut(self, token_ids: Sequence[int], behind: str) -> list[int] | None:
        """Tokens of the text that `token_ids` say, up to where `behind` begins, which ends it but for half a
        character. None where no tokens say that."""


class OfTokenizer:
    """What a grammar engine is made of: a tokenizer. `token_bytes`: gives the bytes that each token stands
    for, b"" for one that no text holds; called once, when the first grammar comes. `special_ids`: tokens that
    are no text. `encode`: text to tokens. A token at or beyond the end of `token_bytes`, as a model's
    vocabulary is often wider, is never allowed."""

    def __init__(
        self,
        token_bytes: Callable[[], Sequence[bytes]],
        encode: Callable[[str], list[int]],
        special_ids: frozenset[int],
        eos_token_ids: Sequence[int],
        vocab_size: int,
    ):
        self._token_bytes, self._encode = token_bytes, encode
        self._special_ids, self.eos_token_ids = special_ids, list(eos_token_ids)
        self._vocab_size = vocab_size
        self._vocabulary: Vocabulary | None = None
        self._lock = threading.Lock()  # of what is made when the first grammar comes

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def notes(self, grammar: GrammarRequest) -> tuple[Note, ...]:
        """As Backend.notes: it allows all."""
        return ()

    def cut(self, token_ids: Sequence[int], behind: str) -> list[int] | None:
        """As Backend.cut: of a token in which `behind` begins the bytes before it, each as a token."""
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

    def _padded_tokens(self) -> list[bytes]:
        tokens = self._tokens_in_vocabulary()
        return tokens + [b""] * (self._vocab_size - len(tokens))

    def _tokens_in_vocabulary(self) -> list[bytes]:
        return list(self._token_bytes())[: self._vocab_size]

    def _texts(self, tokens: Sequence[bytes]) -> list[bytes]:
        """`tokens`, b"" in place of those that are special."""
        return [b"" if token in self._special_ids else text for token, text in enumerate(tokens)]
