"""Whether a text has more tokens than a limit, from slices of it and no further than behind the limit.

A slice ends where its own tokens end, well before the place up to which it was read, and the next one
begins there. Such a cut is exact where the next slice reads the same tokens there: byte-level BPE joins two
tokens or not by looking at these two alone (van Antwerpen and Neubeck, "So many tokens, so little time",
2024), so tokens that stand side by side in one slice do so in the whole. Where no cut is exact, which only
crafted text brings about, a slice counts half.
"""

from collections.abc import Iterator

import tokenizers

SLICE_CHARS = 2**15
SURE_CHARS = 4  # a token: a text of no more than these for each allowed token is not counted beforehand
_MARGIN = 2**10  # characters at a slice's end whose tokens depend on what follows
_AGREE = 4  # tokens behind a cut that both slices read alike
_CUTS = 32  # tokens' ends that are tried, until one is an exact cut


def exceeds(tokenizer: tokenizers.Tokenizer, text: str, limit: int) -> bool:
    """Whether `text` has more than `limit` tokens. False says nothing of a text that is not long: then
    tokenizing it whole takes no longer than counting would."""
    if len(text) <= max(SLICE_CHARS, SURE_CHARS * limit):
        return False
    count = start = 0
    while count <= limit and start + SLICE_CHARS < len(text):
        tokens, length = _slice(tokenizer, text, start)
        count += tokens
        start += length
    return count > limit


def _slice(tokenizer: tokenizers.Tokenizer, text: str, start: int) -> tuple[int, int]:
    """How many tokens the text has from `start` on, and up to how many characters behind it."""
    encoding = tokenizer.encode(text[start : start + SLICE_CHARS], add_special_tokens=False)
    ids = encoding.ids
    for place, end in _ends(encoding.offsets):
        behind = text[start + end : start + end + _MARGIN]
        again = tokenizer.encode(behind, add_special_tokens=False).ids
        if again[:_AGREE] == ids[place : place + _AGREE]:
            return place, end
    return len(ids) // 2, SLICE_CHARS


def _ends(offsets: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """(index, character) of tokens that begin where the one before ended, from the margin backwards."""
    place, found = len(offsets), 0
    while place > 1 and found < _CUTS:
        place -= 1
        end = offsets[place][0]
        if end <= SLICE_CHARS - _MARGIN and offsets[place - 1][1] == end:
            found += 1
            yield place, end
