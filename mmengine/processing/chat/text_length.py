"""Tests whether a text has more tokens than a limit, slice by slice, and stops soon after the limit.

A slice ends at a token end, well before the last character that was read, and the next slice begins there.
The cut is exact if the next slice reads the same tokens at its beginning. Byte-level BPE decides whether to
join two tokens by these two alone (van Antwerpen and Neubeck, "So many tokens, so little time", 2024), so
tokens that are neighbours in one slice are neighbours in the whole text. Without an exact cut, which only
crafted text causes, a slice counts half.
"""

from collections.abc import Iterator

import tokenizers

SLICE_CHARS = 2**15
SURE_CHARS = 4  # Characters per allowed token: a shorter text is not counted beforehand.
_MARGIN = 2**10  # Characters at a slice's end whose tokens depend on the following text.
_AGREE = 4  # Tokens after a cut that both slices must read alike.
_CUTS = 32  # Token ends that are tried as cuts.


def exceeds(tokenizer: tokenizers.Tokenizer, text: str, limit: int) -> bool:
    """Return whether `text` has more than `limit` tokens. For a short text the result is False without
    counting: tokenizing it takes no longer than counting.
    """
    if len(text) <= max(SLICE_CHARS, SURE_CHARS * limit):
        return False
    count = start = 0
    while count <= limit and start + SLICE_CHARS < len(text):
        tokens, length = _slice(tokenizer, text, start)
        count += tokens
        start += length
    return count > limit


def _slice(tokenizer: tokenizers.Tokenizer, text: str, start: int) -> tuple[int, int]:
    """Return how many tokens the text has from `start` on, and how many characters these span."""
    encoding = tokenizer.encode(text[start : start + SLICE_CHARS], add_special_tokens=False)
    ids = encoding.ids
    for place, end in _ends(encoding.offsets):
        behind = text[start + end : start + end + _MARGIN]
        again = tokenizer.encode(behind, add_special_tokens=False).ids
        if again[:_AGREE] == ids[place : place + _AGREE]:
            return place, end
    return len(ids) // 2, SLICE_CHARS


def _ends(offsets: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield (index, character) of tokens that begin where the previous token ended, from the margin
    backwards.
    """
    place, found = len(offsets), 0
    while place > 1 and found < _CUTS:
        place -= 1
        end = offsets[place][0]
        if end <= SLICE_CHARS - _MARGIN and offsets[place - 1][1] == end:
            found += 1
            yield place, end
