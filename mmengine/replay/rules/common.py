"""Common checks in the rules for several decisions: int32 columns, new blocks, budgets, and encoder work."""

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np

from mmengine.core.state.request_state import RequestState
from mmengine.core.state.state import State
from mmengine.events import vocabulary as ev
from mmengine.replay.findings import BrokenRule

Rules: TypeAlias = Iterator[BrokenRule]


class MalformedColumn(ValueError):
    """Raised for bytes that are not an int32 column, and for columns whose lengths do not match. A log with
    such a column is corrupt.
    """


def int32_column(name: str, column: bytes | None) -> np.ndarray:
    """Return the values of an int32 column. Raises MalformedColumn."""
    if column and len(column) % 4:
        raise MalformedColumn(f"{name} has {len(column)} bytes, which is not a multiple of 4 (int32)")
    return np.frombuffer(column or b"", np.int32)


def out_of_range(rule: str, name: str, values: np.ndarray, low: int, high: int) -> Rules:
    """Yield a broken rule if a value is outside [low, high). A decision with such a value cannot be applied
    to the state.
    """
    if len(values) and not low <= int(values.min()) <= int(values.max()) < high:
        worst = int(values.min()) if values.min() < low else int(values.max())
        text = f"{name} has the value {worst}; {low} to {high - 1} exist"
        yield BrokenRule(rule, text, worst, high - 1, can_fold=False)


def check_token_budget(state: State, num_tokens: int) -> Rules:
    if num_tokens > state.tokens_left:
        limit = state.config.token_budget
        total = limit - state.tokens_left + num_tokens
        text = f"step {state.step} schedules {total} tokens of a budget of {limit} (token_budget)"
        yield BrokenRule("budgets", text, total, limit)


def check_new_blocks(state: State, new: np.ndarray, references: np.ndarray | None = None) -> Rules:
    """Check that new blocks are free, and that no block is taken twice. `references`: each block's reference
    count; None: the counts in `state`.
    """
    held = (state.blocks.references if references is None else references)[new]
    if held.any():
        place = int((held != 0).argmax())
        block, count = int(new[place]), int(held[place])
        text = f"step {state.step} takes block {block} as a new block, but it has {count} references"
        yield BrokenRule("blocks", text, count, 0)
    if len(new) > 1 and (twice := len(new) - len(np.unique(new))):
        text = f"step {state.step} takes {twice} of its new blocks more than once"
        yield BrokenRule("blocks", text, twice, 0)


def check_encoder_work(
    state: State, event: ev.Scheduled | ev.Admitted, starts: RequestState | None = None
) -> Rules:
    """Check the media items that a decision encodes. `starts`: the admitted request for ADMITTED; None for
    SCHEDULED.
    """
    size = 0
    for _, row, index in event.encode:
        owner = starts
        if starts is None:
            owner = state.requests_by_row[row] if 0 <= row < state.config.num_rows else None
        elif isinstance(event, ev.Admitted) and row != event.row:
            owner = None
        if owner is None:
            text = f"step {state.step} encodes an item for row {row}, which has no request in this decision"
            yield BrokenRule("encoder", text, row, 0, can_fold=False)
            return
        count = len(owner.request.media)
        if not 0 <= index < count:
            text = f"step {state.step} encodes item {index} of a request with {count} items"
            yield BrokenRule("encoder", text, index, count, can_fold=False)
            return
        size += owner.request.media[index].num_embeds
    if size > state.encoder_left:
        limit = state.config.encoder_budget
        total = limit - state.encoder_left + size
        text = f"step {state.step} encodes {total} embeddings of a budget of {limit} (encoder_budget)"
        yield BrokenRule("budgets", text, total, limit)
