"""Checks a log's observations (events from outside the engine) against the state. A false observation makes
the log corrupt.
"""

import numpy as np

from mmengine.core.state.state import State
from mmengine.core.step_result import check_drafted, prompt_logprobs
from mmengine.events import vocabulary as ev


def check_observation(state: State, event: ev.Event) -> None:
    """Raise ValueError for numbers that contradict the state. Applying an event with such numbers could
    allocate too much memory.
    """
    match event:
        case ev.Arrived(request_id=name):
            most = 8 * state.requests[name].num_fetching
            if not 0 < len(event.digests) <= most:
                raise ValueError(
                    f"digests has {len(event.digests)} bytes, outside 1 to {most} (8 for each block that the "
                    "request still waits for)"
                )
        case ev.Executed():
            _check_tokens(state, event)
        case ev.Drafted():
            columns = (event.rows, event.num_drafts, event.drafts)
            check_drafted(state, *(np.frombuffer(column, np.int32) for column in columns))


def _check_tokens(state: State, event: ev.Executed) -> None:
    sampled = state.sampled_rows()
    num_tokens = len(sampled)
    if event.counts is not None:
        _check_column("counts", event.counts, 1, state.config.num_draft_tokens + 2)
        counts = np.frombuffer(event.counts, np.int32)
        if len(counts) != len(sampled) or (counts > state.sampled_drafts() + 1).any():
            raise ValueError(
                f"counts must have one value for each of the {len(sampled)} sampled rows, at most the "
                "row's number of drafts plus 1"
            )
        num_tokens = int(counts.sum())
    if len(event.token_ids) != 4 * num_tokens:
        raise ValueError(
            f"token_ids has {len(event.token_ids) // 4} tokens, but the step's {len(sampled)} sampled rows "
            f"have {num_tokens}"
        )
    if not (event.prompt_logprobs or event.pooled or state.num_prefills) and event.num_drafts is None:
        return
    for found in prompt_logprobs(event):
        if not 0 <= found.row < len(sampled):
            raise ValueError(
                f"prompt_logprobs has the index {found.row}, but the step has {len(sampled)} sampled rows"
            )
    named, expected = [row for row, _, _ in event.pooled], set(state.pooled_rows())
    rows = state.flights[0].rows if state.flights else state.step_rows
    if len(set(named)) != len(named) or not expected <= set(named) <= set(rows.tolist()):
        raise ValueError(f"pooled names the rows {named}, but the step pools {sorted(expected)}")
    if any(len(digest) not in (0, 32) or len(vector) % 4 for _, digest, vector in event.pooled):
        raise ValueError("pooled has a digest that is not SHA-256, or a vector that is not float32")
    if event.num_drafts is not None:
        _check_column("num_drafts", event.num_drafts, 0, state.config.num_draft_tokens + 1)
        num_drafts = np.frombuffer(event.num_drafts, np.int32)
        if len(num_drafts) != len(sampled) or 4 * int(num_drafts.sum()) != len(event.drafts):
            raise ValueError(
                f"num_drafts must have one value for each of the {len(sampled)} sampled rows, and their sum "
                f"must be the number of tokens in drafts ({len(event.drafts) // 4})"
            )
        if len(state.flights) > 1 and len(event.drafts):
            raise ValueError("the step has drafts, but the step after it was already dispatched")


def _check_column(name: str, column: bytes | None, low: int, high: int) -> None:
    """Raise ValueError if the bytes are not int32 values, or if a value is outside [low, high)."""
    values = np.frombuffer(column or b"", np.int32)
    if len(values) and not low <= int(values.min()) <= int(values.max()) < high:
        raise ValueError(
            f"{name} has values from {values.min()} to {values.max()}; {low} to {high - 1} are allowed"
        )
