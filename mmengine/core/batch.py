"""From the open step of a state to what an executor needs: pure index arithmetic."""

import numpy as np

from mmengine.core.executor import Admission, EncodeItem, MediaSpan, StepPlan
from mmengine.core.state import NEVER, View
from mmengine.events import vocabulary as ev


def batch(view: View, decisions: list[ev.Event]) -> StepPlan:
    """The plan of the open step, after its `decisions` (SCHEDULED, ADMITTED) were applied."""
    rows = view.step_rows
    num_scheduled = view.scheduled[rows]
    computed = view.num_computed[rows] - num_scheduled
    total = int(num_scheduled.sum())
    ends = np.cumsum(num_scheduled, dtype=np.int32)
    starts = ends - num_scheduled
    token_rows = np.repeat(rows, num_scheduled)
    token_index = np.arange(total, dtype=np.int32) + np.repeat(computed - starts, num_scheduled)
    size = view.block_size
    blocks = view.block_table[token_rows, token_index // size].astype(np.int64)
    width = int(view.num_blocks[rows].max())
    table = view.block_table[rows, :width] * (np.arange(width) < view.num_blocks[rows][:, None])
    admitted = [event for event in decisions if isinstance(event, ev.Admitted)]
    return StepPlan(
        step=view.step,
        rows=rows,
        num_scheduled=num_scheduled,
        num_computed=computed,
        input_ids=view.token_ids[token_rows, token_index],
        token_index=token_index,
        slot_mapping=blocks * size + token_index % size,
        block_table=table.astype(np.int32),
        sample=np.flatnonzero(view.num_computed[rows] >= view.num_tokens[rows]).astype(np.int32),
        admitted=tuple(_admission(view, event.row) for event in admitted),
        evict=(*view.encoder.dropped, *view.step_evicted),
        encode=tuple(
            EncodeItem(key, view.requests_by_row[row].request, index)
            for event in decisions
            for key, row, index in event.encode
        ),
        media=tuple(_media_spans(view, rows, computed, num_scheduled, starts)),
        **{name: np.concatenate(parts) for name, parts in view.step_copies.items() if parts},
        num_drafts=view.scheduled_drafts[rows] if view.config.num_draft_tokens else None,
    )


def _admission(view: View, row: int) -> Admission:
    known = view.requests_by_row[row]
    return Admission(row, known.request, view.token_ids[row, : view.num_tokens[row]].copy())


def _media_spans(
    view: View, rows: np.ndarray, computed: np.ndarray, num_scheduled: np.ndarray, starts: np.ndarray
) -> list[MediaSpan]:
    """Where features of the encoder go in the batch. Only rows that hold a reference have any."""
    spans = []
    for place in np.flatnonzero(view.release_at[rows] != NEVER).tolist():
        known = view.requests_by_row[int(rows[place])]
        low, high = int(computed[place]), int(computed[place] + num_scheduled[place])
        for index in sorted(known.held_media):
            offset = 0
            for start, length in known.request.media[index].runs:
                first, last = max(start, low), min(start + length, high)
                if first < last:
                    batch_start = int(starts[place]) + first - low
                    spans.append(
                        MediaSpan(known.media_keys[index], batch_start, offset + first - start, last - first)
                    )
                offset += length
    return spans
