"""Tokens to text while they arrive: whole characters only, and nothing past a stop string.

A byte-level tokenizer may spread one character over several tokens. Decoding a cut character
gives U+FFFD at the end of the text, and more tokens can change that last character only; so it
is held back, and everything before it is final. Decoding looks at a short window of tokens, never
at the whole answer; and where a text is its tokens' bytes, joined, at the new ones alone.
"""

import codecs
from collections.abc import Sequence
from typing import NamedTuple

from mmengine.models.plugin import Tokenizer
from mmengine.request import GrammarRequest, SamplingParams
from mmengine.structured_output.grammar_start import GrammarStart

REPLACEMENT = "\ufffd"
WINDOW = 16  # tokens decoded at once, before the window moves
CONTEXT = 4  # tokens that stay in it: a character has at most four bytes, so four tokens


class ByteDetokenizer:
    """The text of a growing list of tokens that are bytes: `pieces`, by id."""

    def __init__(self, pieces: Sequence[bytes]):
        self._pieces, self._size = pieces, len(pieces)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._holds = False  # a cut character

    def push(self, token_ids: Sequence[int]) -> str:
        """The characters that `token_ids` complete."""
        pieces, size = self._pieces, self._size
        if len(token_ids) == 1 and token_ids[0] < size:
            data = pieces[token_ids[0]]
        else:
            data = b"".join([pieces[token] for token in token_ids if token < size])
        if not self._holds and data.isascii():  # most are, and the decoder takes several times as long
            return data.decode("ascii")
        text = self._decoder.decode(data)
        self._holds = bool(self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        """What was held back: a cut character, shown as decoding the whole answer would."""
        self._holds = False
        return self._decoder.decode(b"", True)


class Detokenizer:
    """The text of a growing list of tokens, of any tokenizer. O(1) decoding work a token."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._window: list[int] = []
        self._emitted = 0  # characters of the window's text that were given out

    def push(self, token_ids: Sequence[int]) -> str:
        """The characters that `token_ids` complete."""
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
        """What was held back: a cut character, shown as decoding the whole answer would."""
        return self._decode(self._window)[self._emitted :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special)

    def _shrink(self, text: str) -> None:
        """Drop tokens from the window where a cut splits no character: what is left decodes to the
        end of the text. Of four tokens in a row one begins a character, unless they are empty."""
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
    """Text that ends before the first of these strings. `stopped` turns true there, `stopped_by` says which
    it was, `behind` what was dropped, from that string on. Later text is dropped, or with `closes` it is what
    completes the text before."""

    def __init__(self, stop: Sequence[str], closes: bool = False):
        self._stop, self._closes = tuple(stop), closes
        self._held = ""
        self.stopped = False
        self.stopped_by = self.behind = ""

    def push(self, new: str, *, counts: bool = True) -> str:
        """What is safe to show. `counts`: whether a string may end in `new`."""
        if not self._stop:
            return new
        if not new or self.stopped:
            return new if self._closes else ""
        text = self._held + new
        if counts:
            place = _first_match(text, self._stop, len(self._held))
            if place is not None:
                self.stopped, self._held, self.behind = True, "", text[place:]
                self.stopped_by = next(string for string in self._stop if text.startswith(string, place))
                return text[:place]
        keep = _longest_partial(text, self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back: no string of the end came."""
        rest, self._held = self._held, ""
        return rest


class TextStream:
    """The text of one answer, ready to be shown: stop strings never leak, not even in part.

    A stop string counts when a token completes it that is not among the first `min_tokens`, and lies behind
    the tokens `after`. `stopped` turns true then, and `stopped_by` says which it was; the text ends before
    the stop string, and later tokens are ignored, or with `closes` they complete it.
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
    def behind(self) -> str:
        """What was dropped of the text when it stopped: it begins with the stop string."""
        return self._until.behind

    def push(self, token_ids: Sequence[int]) -> str:
        """New text that is safe to show, possibly empty."""
        if not self._has_stop:
            return self._detokenizer.push(token_ids)
        pieces = []
        for token_id in token_ids:  # one by one: which token completes the string decides the end
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
            if self.stopped and not was_stopped:  # half a character that it may hold was dropped as well
                self._detokenizer = _detokenizer(self._tokenizer)
        return "".join(pieces)

    def finish(self) -> str:
        """The rest of the text, at the end of the answer."""
        if self.stopped and not self._closes:
            return ""
        return self._until.finish() + self._detokenizer.finish()


def _detokenizer(tokenizer: Tokenizer) -> "Detokenizer | ByteDetokenizer":
    pieces: Sequence[bytes] | None = getattr(tokenizer, "text_bytes", None)
    return Detokenizer(tokenizer) if pieces is None else ByteDetokenizer(pieces)


def _first_match(text: str, stop: Sequence[str], old: int) -> int | None:
    """Where the earliest stop string begins that ends after the first `old` characters."""
    places = [text.find(string, max(0, old - len(string) + 1)) for string in stop]
    return min((place for place in places if place >= 0), default=None)


def _longest_partial(text: str, stop: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins a stop string without completing it."""
    longest = 0
    for string in stop:
        for length in range(min(len(string) - 1, len(text)), longest, -1):
            if text.endswith(string[:length]):
                longest = length
                break
    return longest


class Stops(NamedTuple):
    """Where stop strings end the text of an answer: the fields of TextStream."""

    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    after: tuple[int, ...] = ()
    closes: bool = False

    @classmethod
    def of(cls, sampling: SamplingParams, grammar: GrammarRequest | None) -> "Stops":
        """Calls of tools hold what they hold: beside them the text has none (see ChoiceDeltas)."""
        if grammar is None:
            return cls(sampling.stop, sampling.min_stop_tokens)
        stop = () if grammar.kind == "tool_calls" else sampling.stop
        return cls(stop, sampling.min_stop_tokens, grammar.after, grammar.closes)

    def stream(self, tokenizer: Tokenizer) -> TextStream:
        return TextStream(
            tokenizer, stop=self.stop, min_tokens=self.min_tokens, after=self.after, closes=self.closes
        )

    def text(self, tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
        """The text of a whole answer, without the stop string that ended it."""
        if not self.stop:
            return tokenizer.decode(token_ids)
        stream = self.stream(tokenizer)
        return stream.push(token_ids) + stream.finish()
