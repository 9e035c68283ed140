"""Tokens to text while they arrive: whole characters only, and nothing past a stop string.

A byte-level tokenizer may spread one character over several tokens. Decoding a cut character
gives U+FFFD at the end of the text, and more tokens can change that last character only; so it
is held back, and everything before it is final. Decoding looks at a short window of tokens, never
at the whole answer; and where a text is its tokens' bytes, joined, at the new ones alone.
"""

import codecs
from collections.abc import Sequence

import numpy as np

from mmengine.models.plugin import Tokenizer
from mmengine.request import Request

REPLACEMENT = "\ufffd"
WINDOW = 16  # tokens decoded at once, before the window moves
CONTEXT = 4  # tokens that stay in it: a character has at most four bytes, so four tokens


class ByteDetokenizer:
    """The text of a growing list of tokens that are bytes: `pieces`, by id."""

    def __init__(self, pieces: Sequence[bytes]):
        self._pieces = pieces
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_ids: Sequence[int]) -> str:
        """The characters that `token_ids` complete."""
        pieces = self._pieces
        data = b"".join([pieces[token] for token in token_ids if token < len(pieces)])
        return self._decode(data)

    def finish(self) -> str:
        """What was held back: a cut character, shown as decoding the whole answer would."""
        return self._decode(b"", True)


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
    it was, and later text is dropped."""

    def __init__(self, stop: Sequence[str]):
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False
        self.stopped_by = ""

    def push(self, new: str, *, counts: bool = True) -> str:
        """What is safe to show. `counts`: whether a string may end in `new`."""
        if not self._stop:
            return new
        if not new or self.stopped:
            return ""
        text = self._held + new
        if counts:
            place = _first_match(text, self._stop, len(self._held))
            if place is not None:
                self.stopped, self._held = True, ""
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

    A stop string counts when a token completes it that is not among the first `min_tokens`.
    `stopped` turns true then, and `stopped_by` says which it was; the text ends before the stop string, and
    later tokens are ignored.
    """

    def __init__(self, tokenizer: Tokenizer, *, stop: Sequence[str] = (), min_tokens: int = 0):
        pieces: Sequence[bytes] | None = getattr(tokenizer, "text_bytes", None)
        self._detokenizer = Detokenizer(tokenizer) if pieces is None else ByteDetokenizer(pieces)
        self._has_stop, self._until = bool(stop), UntilStop(stop)
        self._min_tokens = min_tokens
        self._num_tokens = 0

    @property
    def stopped(self) -> bool:
        return self._until.stopped

    @property
    def stopped_by(self) -> str:
        return self._until.stopped_by

    def push(self, token_ids: Sequence[int]) -> str:
        """New text that is safe to show, possibly empty."""
        if not self._has_stop:
            return self._detokenizer.push(token_ids)
        pieces = []
        for token_id in token_ids:  # one by one: which token completes the string decides the end
            if self.stopped:
                break
            self._num_tokens += 1
            counts = self._num_tokens >= self._min_tokens
            pieces.append(self._until.push(self._detokenizer.push((token_id,)), counts=counts))
        return "".join(pieces)

    def finish(self) -> str:
        """The rest of the text, at the end of the answer."""
        if self.stopped:
            return ""
        return self._until.finish() + self._detokenizer.finish()


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


def answer_text(
    tokenizer: Tokenizer, token_ids: Sequence[int], *, stop: Sequence[str], min_tokens: int
) -> str:
    """The text of a whole answer, without the stop string that ended it."""
    if not stop:
        return tokenizer.decode(token_ids)
    stream = TextStream(tokenizer, stop=stop, min_tokens=min_tokens)
    return stream.push(token_ids) + stream.finish()


class StopStrings:
    """Watches the text of the running rows for stop strings, on behalf of the model runner.

    Only rows whose request has stop strings cost anything.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._watched = np.zeros(0, dtype=bool)
        self._streams: dict[int, TextStream] = {}

    def admit(self, row: int, request: Request, token_ids: Sequence[int]) -> None:
        """`request` got `row`; `token_ids` are its prompt and the output it has so far."""
        if row >= len(self._watched):
            self._watched = np.concatenate(
                [self._watched, np.zeros(row + 1 - len(self._watched), dtype=bool)]
            )
        self._streams.pop(row, None)
        self._watched[row] = bool(request.sampling.stop)
        if not request.sampling.stop:
            return
        stream = TextStream(
            self._tokenizer, stop=request.sampling.stop, min_tokens=request.sampling.min_stop_tokens
        )
        stream.push([int(token) for token in token_ids[len(request.prompt_token_ids) :]])
        self._streams[row] = stream

    def feed(self, rows: np.ndarray, token_ids: np.ndarray) -> list[int]:
        """One new token (int32 [s]) for each of `rows` (int32 [s]): the indices, ascending, at
        which a stop string is now complete."""
        stopped = []
        for index in np.flatnonzero(self._watched[rows]).tolist():
            stream = self._streams[int(rows[index])]
            stream.push((int(token_ids[index]),))
            if stream.stopped:
                stopped.append(index)
        return stopped
