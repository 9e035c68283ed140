"""The invariant for a step's plan (the executor's input). The plan must have the scheduled tokens and the KV
slots of the scheduled rows.
"""

from collections.abc import Iterator

import numpy as np

from mmengine.core.executor import PENDING, StepPlan
from mmengine.core.state.state import State

PLAN = "plan"
DESCRIPTION = "Check that a step's plan has the tokens, positions, KV slots and copies of its rows."


def broken_plan(state: State, plan: StepPlan) -> Iterator[str]:
    """Yield a sentence for each difference between the plan and the state at the plan's dispatch."""
    rows, size = plan.rows, state.block_size
    after = plan.num_computed + plan.num_scheduled
    wrong = np.flatnonzero(after != state.num_computed[rows])
    for place in wrong[:1].tolist():
        row = int(rows[place])
        end, due = int(after[place]), int(state.num_computed[row])
        yield f"the plan computes the first {end} tokens of row {row}, but the step the first {due}"
    owners = np.repeat(rows, plan.num_scheduled)
    starts = np.cumsum(plan.num_scheduled) - plan.num_scheduled
    positions = np.arange(len(owners)) + np.repeat(plan.num_computed - starts, plan.num_scheduled)
    if not np.array_equal(plan.token_index, positions):
        yield "the plan's token positions are not those of its rows' next tokens"
        return
    slots = state.block_table[owners, positions // size].astype(np.int64) * size + positions % size
    for place in _differ(plan.slot_mapping, slots):
        yield (
            f"the plan writes token {int(positions[place])} of row {int(owners[place])} to KV slot "
            f"{int(plan.slot_mapping[place])} instead of slot {int(slots[place])}"
        )
    known = (plan.input_ids != PENDING) & (positions < state.num_tokens[owners])
    for place in _differ(plan.input_ids[known], state.token_ids[owners, positions][known]):
        row, at = int(owners[known][place]), int(positions[known][place])
        yield f"the plan's token {at} of row {row} is not the row's token"
    yield from _broken_windows(state, plan, owners, positions)
    width = plan.block_table.shape[1]
    tables = state.block_table[rows, :width]
    other = plan.block_table[:, : tables.shape[1]] != tables
    if state.config.uniform_window:
        other &= tables != 0
    if other.any():
        row = int(rows[np.flatnonzero(other.any(axis=1))[0]])
        yield f"the plan's block table of row {row} is not the row's"
    flight = state.flights[-1].sampled if state.flights else state.sampled_rows()
    if not np.array_equal(rows[plan.sample], flight):
        yield f"the plan samples the rows {rows[plan.sample].tolist()}, but the step {flight.tolist()}"
    yield from _broken_media(state, plan, starts)
    if state.is_open:  # DISPATCHED removes a step's copies from the state.
        for name, parts in state.step_copies.items():
            wanted, given = [pair for part in parts for pair in part.tolist()], getattr(plan, name)
            if wanted != ([] if given is None else given.tolist()):
                yield f"the plan's copies {name} are not the step's {len(wanted)} copies"


def _broken_windows(state: State, plan: StepPlan, owners: np.ndarray, positions: np.ndarray) -> Iterator[str]:
    """Check the slots and block tables of layer groups with sliding windows. `owners`: each token's row.
    `positions`: each token's position.
    """
    size = state.block_size
    if len(plan.windows) != state.num_groups - 1:
        yield f"the plan has {len(plan.windows)} groups with a window, but the model {state.num_groups - 1}"
        return
    for group, window in enumerate(plan.windows):
        table = state.windows.tables[group]
        slots = table[owners, positions // size].astype(np.int64) * size + positions % size
        for place in _differ(window.slot_mapping, slots):
            yield (
                f"the plan writes token {int(positions[place])} of row {int(owners[place])} in group "
                f"{group + 1} to KV slot {int(window.slot_mapping[place])} instead of slot "
                f"{int(slots[place])}"
            )
        own = table[plan.rows, : window.block_table.shape[1]]
        other = ((own != 0) & (window.block_table[:, : own.shape[1]] != own)).any(axis=1)
        for row in plan.rows[other][:1].tolist():
            yield f"the plan's block table of row {row} in group {group + 1} is not the row's"


def _broken_media(state: State, plan: StepPlan, starts: np.ndarray) -> Iterator[str]:
    given = sorted((span.start, span.key, span.item_start, span.length) for span in plan.media)
    wanted = []
    for place, row in enumerate(plan.rows.tolist()):
        req_state = state.requests_by_row[row]
        if req_state is None or not req_state.request.media:
            continue
        low = int(plan.num_computed[place])
        high = low + int(plan.num_scheduled[place])
        for index, item in enumerate(req_state.request.media):
            offset = 0
            for start, length in item.runs:
                first, last = max(start, low), min(start + length, high)
                if first < last:
                    at = int(starts[place]) + first - low
                    wanted.append((at, req_state.media_keys[index], offset + first - start, last - first))
                offset += length
    if given != sorted(wanted):
        yield (
            f"the plan places {len(given)} runs of embeddings, but they are not the {len(wanted)} runs in "
            "the step's tokens"
        )


def _differ(one: np.ndarray, other: np.ndarray) -> list[int]:
    """Return a list with the first index at which the arrays differ, or an empty list."""
    if len(one) != len(other):
        return [min(len(one), len(other)) - 1]
    return np.flatnonzero(one != other)[:1].tolist()
