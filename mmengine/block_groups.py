"""Block groups: sets of attention layers with the same window, which share KV blocks (vLLM's KV cache
groups).

The layers of the first group see all earlier tokens. The layers of every other group see only a window. A
request frees a block of such a group when no later query can see the block's keys. If all layers have a
window, they form a single group with the longest window.

A vLLM log is an exception: the groups are in vLLM's order, so the first group may have a window.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec

MAX_GROUPS = 64
MAX_LENGTH = 2**24  # The maximum length of a request in tokens, if all its layers have a window.


class BlockGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A set of attention layers that store their KV in common blocks.

    `window`: number of keys that a query sees, including its own; 0 means all keys. `layers`: indices of the
    attention layers.
    """

    window: Annotated[int, msgspec.Meta(ge=0, le=2**24)] = 0
    layers: Annotated[tuple[int, ...], msgspec.Meta(max_length=4096)] = ()


def groups_problem(groups: Sequence[BlockGroup]) -> str | None:
    """Return an error text for groups that contradict each other, or None if the groups are valid."""
    if not groups:
        return None
    if len(groups) == 1 and not groups[0].window:
        return "one group without a window needs no block_groups"
    if len(groups) == 1 and groups[0].window == 1:
        return "the window of the only group is 1; it must be at least 2"
    if len(groups) > 1 and groups[0].window:
        return f"the first group has a window of {groups[0].window}; its layers must see all keys"
    for number, group in enumerate(groups[1:], 1):
        if not group.window:
            return f"group {number} has no window; only the first group's layers see all keys"
    layers = [layer for group in groups for layer in group.layers]
    if len(set(layers)) < len(layers):
        return "a layer is in two groups"
    return None


def most_blocks(groups: Sequence[BlockGroup], num_tokens: int, block_size: int, longest_chunk: int) -> int:
    """Return the maximum number of blocks that a request with `num_tokens` tokens needs, summed over all
    groups.

    `longest_chunk`: maximum number of tokens that a step computes for one request. In a group with a window,
    the request needs blocks for this chunk and for the window before the chunk.
    """
    count = -(-num_tokens // block_size)
    spans = [group.window - 1 + longest_chunk for group in groups if group.window]
    num_full = len(groups) - len(spans) if groups else 1
    return count * num_full + sum(min(count, -(-span // block_size) + 1) for span in spans)


def log_order(groups: Sequence[BlockGroup]) -> tuple[int, ...]:
    """Return the groups' indices in a log's order: the first group without a window, then all others."""
    first = next((number for number, group in enumerate(groups) if not group.window), 0)
    return tuple(sorted(range(len(groups)), key=lambda number: number != first))


def longest_row(groups: Sequence[BlockGroup], num_blocks: int, block_size: int, longest_chunk: int) -> int:
    """Return the maximum length in tokens of a request whose blocks fit into `num_blocks` blocks. If all
    groups have a window, requests free their old blocks. The result is then MAX_LENGTH if the blocks of the
    windows and a chunk fit.

    `num_blocks` does not count the dummy block, which no request uses.
    """
    all_windows = bool(groups) and all(group.window for group in groups)
    # `low` and `high` are lengths in blocks.
    low, high = 0, MAX_LENGTH // block_size if all_windows else max(0, num_blocks)
    while low < high:
        middle = (low + high + 1) // 2
        if most_blocks(groups, middle * block_size, block_size, longest_chunk) <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low * block_size
