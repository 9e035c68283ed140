"""The rules for the event SCHEDULED: rows, token counts, drafts and new blocks."""

import numpy as np

from mmengine.core.state.blocks import further_blocks
from mmengine.core.state.columns import LEFT, NEVER
from mmengine.core.state.lazy_windows import settled_tokens
from mmengine.core.state.state import State
from mmengine.events import vocabulary as ev
from mmengine.replay.findings import BrokenRule
from mmengine.replay.rules.common import (
    MalformedColumn,
    Rules,
    check_encoder_work,
    check_new_blocks,
    check_token_budget,
    int32_column,
    out_of_range,
)


def check_scheduled(state: State, event: ev.Scheduled) -> Rules:
    if _is_plain(state, event):
        return
    config = state.config
    rows = state.last_rows if event.rows is None else int32_column("rows", event.rows)
    counts = np.ones(len(rows), np.int32)
    if event.num_tokens is not None:
        counts = int32_column("num_tokens", event.num_tokens)
    drafts = np.zeros(len(rows), np.int32)
    if event.num_drafts is not None:
        drafts = int32_column("num_drafts", event.num_drafts)
    if not len(rows) == len(counts) == len(drafts):
        lengths = f"{len(rows)} rows, {len(counts)} token counts and {len(drafts)} draft counts"
        raise MalformedColumn(f"SCHEDULED has {lengths}, which must be equally many")
    new, width = int32_column("new_blocks", event.new_blocks), state.token_ids.shape[1]
    for rules in (
        out_of_range("rows", "rows", rows, 0, config.num_rows),
        out_of_range("budgets", "num_tokens", counts, 1, width + 1),
        out_of_range("budgets", "num_drafts", drafts, 0, width + 1),
        out_of_range("blocks", "new_blocks", new, 1, config.num_blocks),
    ):
        if (broken := next(rules, None)) is not None:
            yield broken
            return
    yield from _step_rows(state, rows, is_new=event.rows is not None)
    yield from check_token_budget(state, int(counts.sum()))
    yield from _reach(state, rows, counts, drafts)
    yield from _new_blocks(state, rows, counts, new)
    yield from check_encoder_work(state, event)


def _is_plain(state: State, event: ev.Scheduled) -> bool:
    """Return whether the event is a plain decode step with the last step's rows, and breaks no rule. Most
    steps are such steps, and this check is several times as fast as the complete checks.
    """
    if not (event.rows is event.num_tokens is event.num_drafts is None) or event.encode:
        return False
    rows = state.last_rows
    return bool(
        not len(state.step_rows)
        and len(rows) <= state.tokens_left
        and (state.num_computed[rows] < state.num_tokens[rows] + state.num_pending[rows]).all()
        and (state.max_total[rows] != NEVER).all()
        and (state.ended[rows] != LEFT).all()
    ) and _has_plain_blocks(state, rows, event.new_blocks)


def _has_plain_blocks(state: State, rows: np.ndarray, new_blocks: bytes) -> bool:
    """Return whether `new_blocks` are free, and whether the rows need exactly this number to compute a token
    each.
    """
    short, further = further_blocks(state, state.config, rows, 1)
    if not new_blocks or state.num_groups > 1:
        return not new_blocks and not len(short)
    if len(new_blocks) % 4:
        return False
    new = np.frombuffer(new_blocks, np.int32)
    numbers = new.tolist()
    return bool(
        len(numbers) == further.sum()
        and len(set(numbers)) == len(numbers)
        and min(numbers) > 0
        and max(numbers) < state.config.num_blocks
        and not state.blocks.references[new].any()
        and (state.num_blocks[rows[short]] + further <= state.block_table.shape[1]).all()
    )


def _step_rows(state: State, rows: np.ndarray, is_new: bool) -> Rules:
    gone = (state.max_total[rows] == NEVER) | (state.ended[rows] == LEFT)
    if gone.any():
        row = int(rows[gone.argmax()])
        text = f"step {state.step} schedules row {row}, which has no request"
        yield BrokenRule("rows", text, row, 0, can_fold=False)
    if not is_new and not len(state.step_rows):
        return
    placed, counts = np.unique(np.concatenate((state.step_rows, rows)), return_counts=True)
    limit = state.config.max_num_seqs
    if (total := int(counts.sum())) > limit:
        text = f"step {state.step} has {total} rows; the limit is {limit} (max_num_seqs)"
        yield BrokenRule("rows", text, total, limit, can_fold=False)
    elif len(placed) < total:
        row, count = int(placed[counts.argmax()]), int(counts.max())
        text = f"step {state.step} has row {row} {count} times"
        yield BrokenRule("rows", text, count, 1)


def _reach(state: State, rows: np.ndarray, counts: np.ndarray, drafts: np.ndarray) -> Rules:
    """Check that no row computes tokens beyond the array's width or beyond its known tokens, or verifies too
    many drafts.
    """
    after = state.num_computed[rows] + counts.astype(np.int64)
    width = state.token_ids.shape[1]
    if len(over := np.flatnonzero(after > width)):
        place = int(over[0])
        text = f"row {int(rows[place])} would have computed {int(after[place])} tokens; a row holds {width}"
        yield BrokenRule("computed", text, int(after[place]), width, can_fold=False)
        return
    known = state.num_tokens[rows] + state.num_pending[rows] + drafts
    if len(over := np.flatnonzero(after > known)):
        place = int(over[0])
        row, value, limit = int(rows[place]), int(after[place]), int(known[place])
        text = f"step {state.step} computes {value} tokens of row {row}, but only {limit} are known"
        yield BrokenRule("computed", text, value, limit)
    most = state.config.num_draft_tokens
    if len(over := np.flatnonzero(drafts > most)):
        row, value = int(rows[over[0]]), int(drafts[over[0]])
        text = f"row {row} verifies {value} drafts; the limit is {most} (num_draft_tokens)"
        yield BrokenRule("budgets", text, value, most)


def _new_blocks(state: State, rows: np.ndarray, counts: np.ndarray, new: np.ndarray) -> Rules:
    """Check that the new blocks are free, and that the rows need exactly this number."""
    short, further = further_blocks(state, state.config, rows, counts)
    needed = int(further.sum()) * state.num_groups
    if len(short) and (state.num_blocks[rows[short]] + further > state.block_table.shape[1]).any():
        width = state.block_table.shape[1]
        text = f"step {state.step} gives a row more than {width} blocks, the most that max_model_len needs"
        yield BrokenRule("blocks", text, width + 1, width, can_fold=False)
    elif len(new) and len(new) != needed:
        text = f"step {state.step} gives its rows {len(new)} new blocks; their tokens need {needed}"
        yield BrokenRule("blocks", text, len(new), needed, can_fold=False)
    elif needed and not len(new):
        text = f"step {state.step} gives its rows no new blocks, but their tokens need {needed}"
        yield BrokenRule("computed", text, 0, needed)
    if state.has_lazy_windows and len(new):
        yield from check_new_blocks(state, new, _references_left(state, rows))
    else:
        yield from check_new_blocks(state, new)


def _references_left(state: State, rows: np.ndarray) -> np.ndarray:
    """Return each block's reference count after the rows have freed blocks outside their sliding windows."""
    references, settled = state.blocks.references.copy(), settled_tokens(state, rows)
    for row, computed in zip(rows.tolist(), settled.tolist(), strict=True):
        if computed >= state.windows.release_at[row]:
            for blocks in state.windows.skipped(row, computed):
                references[blocks] -= 1
    return references
