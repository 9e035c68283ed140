"""Computes each token's position in a completion's text (`text_offset`), counted in code points as in
OpenAI's API.
"""

import codecs
import unicodedata
from collections.abc import Callable, Iterator, Sequence

from mmengine.server.chat.token_texts import TokenTexts
from mmengine.structured_output.engines.exact_encoder import clusters

_FORMS: tuple[Callable[[str], str], ...] = (
    str,
    lambda text: unicodedata.normalize("NFC", text),
    lambda text: unicodedata.normalize("NFKC", text),
    lambda text: unicodedata.normalize("NFD", text),
    lambda text: unicodedata.normalize("NFKD", text),
    str.lower,
)


class TextOffsets:
    """Computes the offsets of an answer's tokens, in order. The text is the echoed prompt followed by the
    answer.

    If several tokens form a character, the character belongs to the last of these tokens. Special tokens are
    not part of an answer's text.
    """

    def __init__(self, texts: TokenTexts, prompt: str = ""):
        self._texts, self._prompt, self._offset = texts, prompt, len(prompt)
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def of_prompt(self, tokens: Sequence[int]) -> list[int]:
        """Return each prompt token's offset in the prompt's text.

        The tokenizer may normalise the text. Special tokens may appear in the text by name, and leading
        special tokens may be missing from the text.
        """
        special = [token in self._texts.special_ids for token in tokens]
        before = next((at for at, is_special in enumerate(special) if not is_special), len(special))
        for num_hidden in (*range(before + 1), len(tokens)):
            shown = [at >= num_hidden or not one for at, one in enumerate(special)]
            pieces = list(self._pieces(tokens, special, shown))
            found = _aligned(pieces, self._prompt)
            if found is not None:
                return found
        return _starts(pieces, len(self._prompt))

    def of(self, tokens: Sequence[int], hidden: Sequence[int] = (), end: int | None = None) -> list[int]:
        """Return the offsets of the answer's next tokens.

        `hidden`: indices of tokens that are not in the text. `end`: the length of the whole text, if it is
        known. Tokens beyond `end`, such as a stop string's tokens, get the offset `end`.
        """
        offsets, left_out = [], frozenset(hidden)
        for place, token in enumerate(tokens):
            offsets.append(self._offset if end is None else min(self._offset, end))
            if place not in left_out and token not in self._texts.special_ids:
                self._offset += len(self._decode(self._texts.of(token)[1]))
        return offsets

    def _pieces(self, tokens: Sequence[int], special: list[bool], shown: list[bool]) -> Iterator[str]:
        """Yield the text that each token completes. A special token yields its name if it is shown, otherwise
        an empty string.
        """
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        for token, is_special, is_shown in zip(tokens, special, shown, strict=True):
            text, data = self._texts.of(token)
            yield (text if is_shown else "") if is_special else decode(data)


def _starts(pieces: Sequence[str], end: int) -> list[int]:
    found, offset = [], 0
    for piece in pieces:
        found.append(min(offset, end))
        offset += len(piece)
    return found


def _aligned(pieces: Sequence[str], text: str) -> list[int] | None:
    """Return the positions in `text` at which the pieces begin. Returns None if the joined pieces are not a
    normalised form of `text`.

    A piece that begins inside a normalised character gets the position of that character.
    """
    spelled = "".join(pieces)
    for form in _FORMS:
        if form(text) != spelled:
            continue
        if form is str:
            return _starts(pieces, len(text))
        places: list[int] = []  # Maps each character of `spelled` to its offset in `text`.
        offset = 0
        for cluster in clusters(text):
            formed = form(cluster)
            same = _common_end(cluster, formed)
            places += [offset] * (len(formed) - same)
            offset += len(cluster)
            places += range(offset - same, offset)
        if len(places) != len(spelled):
            return None
        places.append(offset)
        return [places[start] for start in _starts(pieces, len(spelled))]
    return None


def _common_end(one: str, other: str) -> int:
    """Return the number of characters in the longest suffix that both texts share."""
    count = 0
    for a, b in zip(reversed(one), reversed(other), strict=False):
        if a != b:
            break
        count += 1
    return count
