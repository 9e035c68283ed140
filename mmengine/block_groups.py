"""Block groups: sets of a model's attention layers that share KV blocks, because they see the same window.

The first group's layers see all keys. A row holds its blocks of the other groups only from the first key on
that a later query sees.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec

MAX_GROUPS = 64


class BlockGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One group. `window`: a query sees only keys > query - window; 0: all keys. `layers`: the numbers of the
    attention layers whose KV the group's blocks hold.
    """

    window: Annotated[int, msgspec.Meta(ge=0, le=2**24)] = 0
    layers: Annotated[tuple[int, ...], msgspec.Meta(max_length=4096)] = ()


def groups_problem(groups: Sequence[BlockGroup]) -> str | None:
    """Return what is wrong with the groups, or None."""
    if not groups:
        return None
    if len(groups) < 2:
        return "one group needs no block_groups"
    if groups[0].window:
        return f"the first group has a window of {groups[0].window}; its layers must see all keys"
    for number, group in enumerate(groups[1:], 1):
        if not group.window:
            return f"group {number} has no window; only the first group's layers see all keys"
    layers = [layer for group in groups for layer in group.layers]
    if len(set(layers)) < len(layers):
        return "a layer is in two groups"
    return None


def most_blocks(groups: Sequence[BlockGroup], num_tokens: int, block_size: int, longest_chunk: int) -> int:
    """Return how many blocks a row with `num_tokens` tokens holds at most, in all groups together.

    `longest_chunk`: how many tokens a step computes at most for one row. A row needs the blocks of the chunk,
    and of the window before its first token.
    """
    count = -(-num_tokens // block_size)
    spans = (group.window - 1 + longest_chunk for group in groups[1:])
    return count + sum(min(count, -(-span // block_size) + 1) for span in spans)


def longest_row(groups: Sequence[BlockGroup], num_blocks: int, block_size: int, longest_chunk: int) -> int:
    """Return how many tokens a row may have so that `num_blocks` blocks, without the dummy, hold it."""
    low, high = 0, max(0, num_blocks)  # in blocks of the first group
    while low < high:
        middle = (low + high + 1) // 2
        if most_blocks(groups, middle * block_size, block_size, longest_chunk) <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low * block_size
