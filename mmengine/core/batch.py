"""Builds a step's StepPlan: the arrays and lists that an executor needs to compute the step.

A plan is built after the step's decisions were applied to the state. These functions only read the state.
"""

from collections.abc import Sequence

import numpy as np

from mmengine.core.executor import (
    PENDING,
    Admission,
    EncodeItem,
    EncodePart,
    MediaSpan,
    StatePlan,
    StepPlan,
    WindowPlan,
)
from mmengine.core.state.columns import NEVER, ReadOnlyArray, frozen
from mmengine.core.state.overlap import draft_room
from mmengine.core.state.view import View
from mmengine.events import vocabulary as ev
from mmengine.request import Pooling

_NO_TOKENS, _NO_SLOTS, _NO_TABLES = (
    frozen(np.zeros(*of)) for of in ((0, np.int32), (0, np.int64), ((0, 0), np.int32))
)
_NO_BEGINS, _NONE_KEPT = (frozen(np.zeros((0, width), np.int32)) for width in (2, 3))
SPARE_BLOCKS = 16  # free columns of a copied table, so that rows can grow


class BlockTables:
    """Builds the block tables of a step's rows.

    With `keeps`, the previous tables are updated in place if the rows are the same. Copying all tables
    instead would evict other data from the CPU's cache. With `keeps`, at most one step may be in flight,
    because successive plans share these arrays.

    If `view.step_rows` is the same array object as in the previous step, the rows are the same, and their
    tables can only have grown.
    """

    def __init__(self, keeps: bool):
        self._keeps = keeps
        self._rows: ReadOnlyArray | None = None
        self._num_blocks, self._tables = np.zeros(0, np.int32), list[np.ndarray]()

    def of(self, view: View) -> list[np.ndarray]:
        """Return the decided step's block tables, one table for each block group, int32 [n, b].

        The tables are valid until the step is collected.
        """
        rows, num_blocks = view.step_rows, view.num_blocks[view.step_rows]
        width = int(num_blocks.max(initial=0))
        sources = [view.block_table]
        if view.num_groups > 1:
            sources += [view.windows.tables[group] for group in range(view.num_groups - 1)]
        if not self._keeps:
            return [source[:, :width][rows] for source in sources]
        capacity = self._tables[0].shape[1] if self._tables else 0
        if rows is self._rows and width <= capacity:
            grown = (num_blocks != self._num_blocks).nonzero()[0]
            for table, source in zip(self._tables, sources, strict=True):
                table[grown] = source[rows[grown], :capacity]
        else:
            self._rows = rows
            self._tables = [source[:, : width + SPARE_BLOCKS][rows] for source in sources]
        self._num_blocks = num_blocks
        return [table[:, :width] for table in self._tables]


def batch(view: View, decisions: Sequence[ev.Event], tables: BlockTables) -> StepPlan:
    """Return the plan for the step that was just decided. `decisions`: the step's SCHEDULED, ADMITTED and
    ENCODED events, which were already applied to the state.
    """
    rows = view.step_rows
    num_scheduled, after = view.scheduled[rows], view.num_computed[rows]
    computed = after - num_scheduled
    total, size = view.config.token_budget - view.tokens_left, view.block_size
    if total == len(rows):  # each row computes one token, as in a decode-only step without drafts
        token_rows, token_index = rows, computed.copy()
    else:
        starts = np.cumsum(num_scheduled, dtype=np.int32) - num_scheduled
        token_rows = np.repeat(rows, num_scheduled)
        token_index = np.arange(total, dtype=np.int32) + np.repeat(computed - starts, num_scheduled)
    numbers, offsets = token_index // size, token_index & (size - 1)
    of_groups = [view.block_table[token_rows, numbers]]
    if view.num_groups > 1:
        of_groups += list(view.windows.tables[:, token_rows, numbers])
    slots = [np.multiply(blocks, size, dtype=np.int64) + offsets for blocks in of_groups]
    block_tables = tables.of(view)
    input_ids = view.token_ids[token_rows, token_index]
    if view.flights:
        input_ids[token_index >= view.num_tokens[token_rows]] = PENDING
    admitted = [event for event in decisions if isinstance(event, ev.Admitted)]
    return StepPlan(
        step=view.step,
        rows=rows.astype(np.int32),
        num_scheduled=num_scheduled,
        num_computed=computed,
        input_ids=input_ids,
        token_index=token_index,
        slot_mapping=slots[0],
        block_table=block_tables[0],
        sample=view.due().astype(np.int32),
        admitted=tuple(_admission(view, event.row) for event in admitted),
        evict=(*view.encoder.dropped, *view.step_evicted),
        encode=tuple(EncodeItem(key, request, index) for key, request, index in view.step_encoded),
        media=tuple(_media_spans(view, rows, computed, num_scheduled)) if view.num_with_media else (),
        **{name: np.concatenate(parts) for name, parts in view.step_copies.items() if parts},
        num_drafts=_num_drafts(view, rows),
        draft_room=draft_room(view, rows),
        part=_part(view),
        states=_states(view, rows, admitted) if view.config.num_state_slots else None,
        adapters=view.adapters.loaded,
        pool=_pool(view, rows) if view.num_prefills else (),
        fetched=tuple((name, np.asarray(blocks)) for name, blocks in view.step_fetched),
        windows=tuple(map(WindowPlan, slots[1:], block_tables[1:])),
    )


class Planner:
    """Builds an engine's plans. `keeps`: as in `BlockTables`."""

    def __init__(self, keeps: bool):
        self._tables = BlockTables(keeps)

    def plan(self, view: View, decisions: Sequence[ev.Event]) -> StepPlan:
        """Return the decided step's plan. `decisions`: as in the function `batch`."""
        return batch(view, decisions, self._tables)


class RowPlanner(Planner):
    """Builds plans for a host such as vLLM, where the workers keep the tokens.

    The plans have no block tables and no per-token arrays. The host reads blocks and drafts from the view.
    `rows` and `sample` have the dtype intp.
    """

    def plan(self, view: View, decisions: Sequence[ev.Event]) -> StepPlan:
        rows = np.asarray(view.step_rows)
        num_scheduled = view.scheduled[rows]
        admitted = [event for event in decisions if isinstance(event, ev.Admitted)]
        return StepPlan(
            step=view.step,
            rows=rows,
            num_scheduled=num_scheduled,
            num_computed=view.num_computed[rows] - num_scheduled,
            input_ids=_NO_TOKENS,
            token_index=_NO_TOKENS,
            slot_mapping=_NO_SLOTS,
            block_table=_NO_TABLES,
            sample=view.due(),
            admitted=tuple(_admission(view, event.row) for event in admitted) if admitted else (),
            evict=(*view.encoder.dropped, *view.step_evicted),
            encode=tuple(EncodeItem(key, request, index) for key, request, index in view.step_encoded),
            num_drafts=view.scheduled_drafts[rows] if view.verifies else None,
            adapters=view.adapters.loaded,
        )


def _pool(view: View, rows: ReadOnlyArray) -> tuple[tuple[int, Pooling], ...]:
    """Return (index among `rows`, pooling) for each pooled request whose last prompt token is in the step."""
    ends = np.flatnonzero(view.num_computed[rows] >= view.num_tokens[rows]).tolist()
    found = ((place, view.requests_by_row[rows[place]].request.pooling) for place in ends)
    return tuple((place, pooling) for place, pooling in found if pooling is not None)


def _states(view: View, rows: ReadOnlyArray, admitted: Sequence[ev.Admitted]) -> StatePlan:
    begins, kept = _NO_BEGINS, _NONE_KEPT
    if admitted:
        slots = [(e.state_from, e.state_slot) for e in admitted if isinstance(e, ev.AdmittedWithState)]
        begins = np.array(slots, np.int32).reshape(-1, 2)
    if view.step_kept:
        kept, order = np.concatenate(view.step_kept), np.argsort(rows)
        kept[:, 0] = order[np.searchsorted(rows[order], kept[:, 0])]
    return StatePlan(view.state_slot[rows], begins, kept)


def _part(view: View) -> EncodePart | None:
    part = view.step_part
    if part is None:
        return None
    req_state = view.requests[part.request_id]
    item = EncodeItem(part.key, req_state.request, part.item)
    return EncodePart(item, part.start, part.until, req_state.media_work[part.item])


def _num_drafts(view: View, rows: ReadOnlyArray) -> np.ndarray | None:
    if not view.config.num_draft_tokens:
        return None
    return view.scheduled_drafts[rows] if view.verifies else np.zeros(len(rows), np.int32)


def _admission(view: View, row: int) -> Admission:
    req_state = view.requests_by_row[row]
    return Admission(row, req_state.request, view.token_ids[row, : view.num_tokens[row]].copy())


def _media_spans(
    view: View, rows: ReadOnlyArray, computed: np.ndarray, num_scheduled: np.ndarray
) -> list[MediaSpan]:
    """Return the positions in the batch at which encoder outputs replace token embeddings."""
    spans = []
    starts = np.cumsum(num_scheduled) - num_scheduled
    for place in np.flatnonzero(view.release_at[rows] != NEVER).tolist():
        req_state = view.requests_by_row[int(rows[place])]
        low, high = int(computed[place]), int(computed[place] + num_scheduled[place])
        for index in sorted(req_state.held_media):
            offset = 0
            for start, length in req_state.request.media[index].runs:
                first, last = max(start, low), min(start + length, high)
                if first < last:
                    batch_start = int(starts[place]) + first - low
                    spans.append(
                        MediaSpan(
                            req_state.media_keys[index], batch_start, offset + first - start, last - first
                        )
                    )
                offset += length
    return spans
