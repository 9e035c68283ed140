"""Decodes tokens to text incrementally, as whole characters and up to a stop string.

A byte-level tokenizer may split a character over several tokens. An incomplete character at the text's end
decodes to U+FFFD and is held back. All earlier text is final. Each call decodes a short token window, never
the whole answer. If a tokenizer's text is always the tokens' concatenated bytes, only the new tokens are
decoded.
"""

import codecs
from collections.abc import Sequence
from typing import NamedTuple

from mmengine.models.plugin import Tokenizer
from mmengine.request import GrammarRequest, SamplingParams
from mmengine.structured_output.grammar_start import GrammarStart

REPLACEMENT = "\ufffd"
# Maximum number of new tokens per decode call. A window that has more tokens after the call is shortened.
WINDOW = 16
# Minimum number of tokens that stay in the window, because a character may have four bytes in four tokens.
CONTEXT = 4


class ByteDetokenizer:
    """Decodes a growing token list. `pieces` has each token id's bytes."""

    def __init__(self, pieces: Sequence[bytes]):
        self._pieces, self._size = pieces, len(pieces)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._holds = False  # whether an incomplete character is held back

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the characters that `token_ids` complete."""
        pieces, size = self._pieces, self._size
        if len(token_ids) == 1 and token_ids[0] < size:
            data = pieces[token_ids[0]]
        else:
            data = b"".join([pieces[token] for token in token_ids if token < size])
        # A fast path, since most text is ASCII and the decoder is several times slower.
        if not self._holds and data.isascii():
            return data.decode("ascii")
        text = self._decoder.decode(data)
        self._holds = bool(self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        """Return the incomplete last character, if any, as U+FFFD."""
        self._holds = False
        return self._decoder.decode(b"", True)


class Detokenizer:
    """Decodes a growing token list with any tokenizer. For each new token, O(1) tokens are decoded."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._window: list[int] = []
        self._emitted = 0  # number of characters of the window's text that were already returned

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
        """Return the incomplete last character, if any, as U+FFFD."""
        return self._decode(self._window)[self._emitted :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special)

    def _shrink(self, text: str) -> None:
        """Drop tokens from the window's start, up to a token that begins a character.

        `text`: the window's decoded text. Among CONTEXT consecutive non-empty tokens, at least one begins a
        character.
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

    After a stop string, `stopped` is true, `stopped_by` is the string, and `cut_off` is the dropped text,
    which begins with the string. Without `closes`, later text is dropped too. With `closes`, later text is
    returned, because the answer is JSON, and the sampler completes the JSON value after a stop string.
    """

    def __init__(self, stop: Sequence[str], closes: bool = False):
        self._stop, self._closes = tuple(stop), closes
        self._held = ""
        self.stopped = False
        self.stopped_by = self.cut_off = ""

    def push(self, new: str, *, counts: bool = True) -> str:
        """Return the text that cannot belong to a stop string.

        With `counts` False, a stop string is ignored if its last character lies in `new`.
        """
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
        """Return the text that was held back, after the answer ended without a stop string."""
        rest, self._held = self._held, ""
        return rest


class TextStream:
    """Decodes an answer's tokens to text, cuts the text at a stop string, and holds back text that may begin
    a stop string.

    A stop string counts only if it is completed after the first `min_tokens` tokens and after the token
    sequence `after`. Then `stopped` becomes true, and `stopped_by` is the string. The text ends before the
    stop string. Later tokens are ignored. With `closes`, later tokens are decoded, as in UntilStop.
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
        """The dropped text, which begins with the stop string."""
        return self._until.cut_off

    def push(self, token_ids: Sequence[int]) -> str:
        """Return new text that cannot belong to a stop string. The text may be empty."""
        if not self._has_stop:
            return self._detokenizer.push(token_ids)
        pieces = []
        # Decode each token separately, to find the token that completes a stop string.
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
            # a new detokenizer drops the incomplete character that the old detokenizer holds back
            if self.stopped and not was_stopped:
                self._detokenizer = _detokenizer(self._tokenizer)
        return "".join(pieces)

    def finish(self) -> str:
        """Return the remaining text at the answer's end."""
        if self.stopped and not self._closes:
            return ""
        return self._until.finish() + self._detokenizer.finish()


def _detokenizer(tokenizer: Tokenizer) -> "Detokenizer | ByteDetokenizer":
    pieces: Sequence[bytes] | None = getattr(tokenizer, "text_bytes", None)
    return Detokenizer(tokenizer) if pieces is None else ByteDetokenizer(pieces)


def _first_match(text: str, stop: Sequence[str], old: int) -> int | None:
    """Return where the first stop string begins. A stop string within the first `old` characters does not
    count. Returns None without a match.
    """
    places = [text.find(string, max(0, old - len(string) + 1)) for string in stop]
    return min((place for place in places if place >= 0), default=None)


def _longest_partial(text: str, stop: Sequence[str]) -> int:
    """Return the length of the longest suffix of `text` that is the beginning of a stop string."""
    longest = 0
    for string in stop:
        for length in range(min(len(string) - 1, len(text)), longest, -1):
            if text.endswith(string[:length]):
                longest = length
                break
    return longest


class Stops(NamedTuple):
    """An answer's stop strings and where they apply. The fields are TextStream's arguments."""

    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    after: tuple[int, ...] = ()
    closes: bool = False

    @classmethod
    def of(cls, sampling: SamplingParams, grammar: GrammarRequest | None) -> "Stops":
        """Return the stop strings for an answer's text.

        If the answer may have tool calls, returns no stop strings, because ChoiceDeltas applies the stop
        strings.
        """
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
