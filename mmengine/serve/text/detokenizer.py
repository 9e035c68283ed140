"""Incremental detokenization: whole characters only, and no text after a stop string.

A byte-level tokenizer may split a character over several tokens. Decoding a cut character gives U+FFFD at the
text's end. Further tokens can change only that last character, so it is held back, and all text before it is
final. Decoding examines a short token window and never the whole answer. If a text is the concatenation of
its tokens' bytes, only the new tokens are decoded.
"""

import codecs
from collections.abc import Sequence
from typing import NamedTuple

from mmengine.models.plugin import Tokenizer
from mmengine.request import GrammarRequest, SamplingParams
from mmengine.structured_output.grammar_start import GrammarStart

REPLACEMENT = "\ufffd"
WINDOW = 16  # tokens that are decoded at once, before the window moves
CONTEXT = 4  # tokens that stay in the window: a character has at most four bytes, so at most four tokens


class ByteDetokenizer:
    """Decodes a growing token list. `pieces` has the bytes that each token id stands for."""

    def __init__(self, pieces: Sequence[bytes]):
        self._pieces, self._size = pieces, len(pieces)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._holds = False  # whether a cut character is held back

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the characters that `token_ids` complete."""
        pieces, size = self._pieces, self._size
        if len(token_ids) == 1 and token_ids[0] < size:
            data = pieces[token_ids[0]]
        else:
            data = b"".join([pieces[token] for token in token_ids if token < size])
        if not self._holds and data.isascii():  # most data is ASCII, and the decoder is several times slower
            return data.decode("ascii")
        text = self._decoder.decode(data)
        self._holds = bool(self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        """Return the rest: a cut character, as decoding of the whole answer would show it."""
        self._holds = False
        return self._decoder.decode(b"", True)


class Detokenizer:
    """Decodes a growing token list with any tokenizer. Calls it with O(1) tokens for each new token."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._window: list[int] = []
        self._emitted = 0  # characters of the window's text that were returned

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the characters that `token_ids` complete."""
        pieces = []
        for start in range(0, len(token_ids), WINDOW):
            self._window.extend(token_ids[start : start + WINDOW])
            text = self._decode(self._window)
            stable = text.removesuffix(REPLACEMENT)
            pieces.append(stable[self._emitted :])
            self._emitted = max(self._emitted, len(stable))
            if len(self._window) > WINDOW:
                self._shrink(text)
        return "".join(pieces)

    def finish(self) -> str:
        """Return the rest: a cut character, as decoding of the whole answer would show it."""
        return self._decode(self._window)[self._emitted :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special)

    def _shrink(self, text: str) -> None:
        """Drop tokens from the window's beginning, up to a token that begins a character.

        `text` must end with the text that the remaining tokens decode to. Among any four consecutive tokens,
        at least a single token begins a character, unless tokens are empty.
        """
        for keep in range(CONTEXT, len(self._window)):
            tail = self._decode(self._window[-keep:])
            dropped = len(text) - len(tail)
            if (
                dropped <= self._emitted
                and text.endswith(tail)
                and (REPLACEMENT not in tail or self._decode(self._window[:-keep]) + tail == text)
            ):
                self._window = self._window[-keep:]
                self._emitted -= dropped
                return


class UntilStop:
    """Cuts a text before its first stop string.

    After a stop string `stopped` is true, `stopped_by` is the string, and `cut_off` is the dropped text,
    which begins with the string. Later text is dropped too. With `closes`, later text is returned instead,
    because it completes the JSON value.
    """

    def __init__(self, stop: Sequence[str], closes: bool = False):
        self._stop, self._closes = tuple(stop), closes
        self._held = ""
        self.stopped = False
        self.stopped_by = self.cut_off = ""

    def push(self, new: str, *, counts: bool = True) -> str:
        """Return text that is safe to show. `counts` says whether a stop string may end in `new`."""
        if not self._stop:
            return new
        if not new or self.stopped:
            return new if self._closes else ""
        text = self._held + new
        if counts:
            place = _first_match(text, self._stop, len(self._held))
            if place is not None:
                self.stopped, self._held, self.cut_off = True, "", text[place:]
                self.stopped_by = next(string for string in self._stop if text.startswith(string, place))
                return text[:place]
        keep = _longest_partial(text, self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Return the text that was held back, since no stop string came."""
        rest, self._held = self._held, ""
        return rest


class TextStream:
    """An answer's text, ready to be shown: stop strings never appear, not even in part.

    A stop string counts only if the token that completes it comes after the first `min_tokens` tokens and
    after the token sequence `after`. Then `stopped` becomes true, and `stopped_by` is the string. The text
    ends before the stop string, and later tokens are ignored. With `closes`, later tokens are decoded
    instead, because they complete the JSON value.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        after: Sequence[int] = (),
        closes: bool = False,
    ):
        self._tokenizer, self._closes = tokenizer, closes
        self._detokenizer = _detokenizer(tokenizer)
        self._has_stop, self._until = bool(stop), UntilStop(stop, closes)
        self._opening = GrammarStart(after) if after else None
        self._min_tokens = min_tokens
        self._num_tokens = 0

    @property
    def stopped(self) -> bool:
        return self._until.stopped

    @property
    def stopped_by(self) -> str:
        return self._until.stopped_by

    @property
    def cut_off(self) -> str:
        """The text that was dropped at the stop; it begins with the stop string."""
        return self._until.cut_off

    def push(self, token_ids: Sequence[int]) -> str:
        """Return new text that is safe to show, possibly empty."""
        if not self._has_stop:
            return self._detokenizer.push(token_ids)
        pieces = []
        # token by token: the token that completes the string decides where the text ends
        for token_id in token_ids:
            if self.stopped and not self._closes:
                break
            self._num_tokens += 1
            text, was_stopped = self._detokenizer.push((token_id,)), self.stopped
            if self._opening is None:
                pieces.append(self._until.push(text, counts=self._num_tokens > self._min_tokens))
            else:
                pieces.append(text)
                if self._opening.take((token_id,)) is not None:
                    self._opening = None
            # the dropped text includes half a character that the detokenizer may hold
            if self.stopped and not was_stopped:
                self._detokenizer = _detokenizer(self._tokenizer)
        return "".join(pieces)

    def finish(self) -> str:
        """Return the rest of the text at the answer's end."""
        if self.stopped and not self._closes:
            return ""
        return self._until.finish() + self._detokenizer.finish()


def _detokenizer(tokenizer: Tokenizer) -> "Detokenizer | ByteDetokenizer":
    pieces: Sequence[bytes] | None = getattr(tokenizer, "text_bytes", None)
    return Detokenizer(tokenizer) if pieces is None else ByteDetokenizer(pieces)


def _first_match(text: str, stop: Sequence[str], old: int) -> int | None:
    """Return where the earliest stop string starts that ends beyond the first `old` characters."""
    places = [text.find(string, max(0, old - len(string) + 1)) for string in stop]
    return min((place for place in places if place >= 0), default=None)


def _longest_partial(text: str, stop: Sequence[str]) -> int:
    """Return how long the longest suffix is with which a stop string begins, but does not end."""
    longest = 0
    for string in stop:
        for length in range(min(len(string) - 1, len(text)), longest, -1):
            if text.endswith(string[:length]):
                longest = length
                break
    return longest


class Stops(NamedTuple):
    """An answer's stop strings and where they apply: the arguments of TextStream."""

    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    after: tuple[int, ...] = ()
    closes: bool = False

    @classmethod
    def of(cls, sampling: SamplingParams, grammar: GrammarRequest | None) -> "Stops":
        """Return the stops of an answer's text. With tool calls there are none here (see ChoiceDeltas)."""
        if grammar is None:
            return cls(sampling.stop, sampling.min_stop_tokens)
        stop = () if grammar.kind == "tool_calls" else sampling.stop
        return cls(stop, sampling.min_stop_tokens, grammar.after, grammar.closes)

    def stream(self, tokenizer: Tokenizer) -> TextStream:
        return TextStream(
            tokenizer, stop=self.stop, min_tokens=self.min_tokens, after=self.after, closes=self.closes
        )

    def text(self, tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
        """Return a whole answer's text, without the stop string that ended it."""
        if not self.stop:
            return tokenizer.decode(token_ids)
        stream = self.stream(tokenizer)
        return stream.push(token_ids) + stream.finish()
