"""Checks an executor's results, turns them into events for the log, and reads them from events."""

from collections.abc import Iterator

import numpy as np

from mmengine.core.executor import PooledVector, PromptLogprobs, StepResult
from mmengine.core.state.state import State
from mmengine.errors import ExecutorFailed
from mmengine.events import vocabulary as ev

MAX_ERROR_CHARS = 500  # maximum length of an error text in the log


def executed_event(result: StepResult, state: State, sampled: np.ndarray) -> ev.Executed:
    """Return EXECUTED with the step's result. `sampled`: the rows that get tokens in the step, intp.

    Raises ExecutorFailed if the result does not fit the step.
    """
    _check_tokens(result, state, sampled)
    _check_drafts(result, state, len(sampled))
    for entries in (result.stops, result.errors, result.logprobs, result.prompt_logprobs):
        if entries and any(not 0 <= entry[0] < len(sampled) for entry in entries):
            raise ExecutorFailed(f"the executor's result has an index beyond the {len(sampled)} sampled rows")
    return ev.Executed(
        result.token_ids.tobytes(),
        tuple(result.stops),
        tuple((index, writable(what)) for index, what in result.errors),
        tuple((index, tuple(entries)) for index, entries in result.logprobs),
        result.device_ns,
        _column(result.counts),
        _column(result.drafts) or b"",
        _column(result.num_drafts),
        _column(result.drafters),
        result.draft_ns,
        result.host_ns,
        tuple(
            (index, ids.shape[1], ids.astype(np.int32).tobytes(), logprobs.astype(np.float32).tobytes())
            for index, ids, logprobs in result.prompt_logprobs
        ),
        _pooled(result, state),
    )


def _pooled(result: StepResult, state: State) -> tuple[tuple[int, bytes, bytes], ...]:
    """Return the pooled vectors in EXECUTED's format. Raises ExecutorFailed if the result lacks a vector for
    a pooled request whose prompt ends in this step.
    """
    missing = set(state.pooled_rows()) - {found.row for found in result.pooled}
    if missing:
        raise ExecutorFailed(f"the executor gave no vector for the pooled request in row {min(missing)}")
    keeps = state.config.log_vectors
    return tuple(
        (found.row, found.digest, found.vector.astype(np.float32).tobytes() if keeps else b"")
        for found in result.pooled
    )


def pooled_vectors(event: ev.Executed) -> tuple[PooledVector, ...]:
    """Return an event's pooled vectors as arrays. Raises ValueError for bytes that are not float32."""
    return tuple(
        PooledVector(row, digest, np.frombuffer(vector, np.float32)) for row, digest, vector in event.pooled
    )


def _check_tokens(result: StepResult, state: State, sampled: np.ndarray) -> None:
    tokens, num_sampled = result.token_ids, len(sampled)
    num_tokens = num_sampled
    if result.counts is not None:
        most = state.scheduled_drafts[sampled] + 1
        if len(result.counts) != num_sampled or (result.counts < 1).any() or (result.counts > most).any():
            raise ExecutorFailed(
                "the executor accepted more drafts than a row had, or returned no token for a row"
            )
        num_tokens = int(result.counts.sum())
    if tokens.dtype != np.int32 or len(tokens) != num_tokens:
        raise ExecutorFailed(
            f"the executor gave {len(tokens)} tokens of {tokens.dtype} for {num_sampled} rows that sampled"
        )


def _check_drafts(result: StepResult, state: State, num_sampled: int) -> None:
    if result.num_drafts is None:
        return
    counts, most = result.num_drafts, state.config.num_draft_tokens
    if len(state.flights) > 1 and counts.any():
        raise ExecutorFailed(
            "the executor proposed drafts for a step, but the step after it was already dispatched"
        )
    fits = len(counts) == num_sampled and not (counts < 0).any() and not (counts > most).any()
    if not fits or result.drafts is None or len(result.drafts) != int(counts.sum()):
        raise ExecutorFailed(f"the executor proposed drafts that do not fit num_draft_tokens {most}")


def drafted_event(state: State, rows: np.ndarray, num_drafts: np.ndarray, drafts: np.ndarray) -> ev.Drafted:
    """Return DRAFTED. Raises ExecutorFailed for invalid drafts."""
    check_drafted(state, rows, num_drafts, drafts)
    return ev.Drafted(*(each.astype(np.int32).tobytes() for each in (rows, num_drafts, drafts)))


def check_drafted(state: State, rows: np.ndarray, num_drafts: np.ndarray, drafts: np.ndarray) -> None:
    """Raise ExecutorFailed for drafts during a step, or for rows that cannot have drafts now. Draft counts
    must match `drafts` and must not exceed num_draft_tokens.
    """
    most = state.config.num_draft_tokens
    if state.flights or state.is_open:
        raise ExecutorFailed("drafts arrived while a step is open or in flight")
    if len(np.unique(rows)) != len(rows) or not np.isin(rows, state.running).all():
        raise ExecutorFailed("drafts arrived for rows that do not run, or twice for a row")
    if (state.num_computed[rows] != state.num_tokens[rows] - 1).any():
        raise ExecutorFailed("drafts arrived for a row whose prompt is not computed")
    fits = len(num_drafts) == len(rows) and not (num_drafts < 0).any() and not (num_drafts > most).any()
    if not fits or len(drafts) != int(num_drafts.sum()):
        raise ExecutorFailed(f"{len(drafts)} drafts arrived, which do not fit num_draft_tokens {most}")


def prompt_logprobs(event: ev.Executed) -> Iterator[PromptLogprobs]:
    """Yield an event's prompt logprobs as arrays. Raises ValueError if token ids and logprobs have different
    shapes.
    """
    for index, width, token_ids, logprobs in event.prompt_logprobs:
        ids = np.frombuffer(token_ids, np.int32).reshape(-1, width)
        yield PromptLogprobs(index, ids, np.frombuffer(logprobs, np.float32).reshape(ids.shape))


def _column(values: np.ndarray | None) -> bytes | None:
    return None if values is None else values.astype(np.int32).tobytes()


def writable(text: str) -> str:
    """Return an error text's first MAX_ERROR_CHARS characters, with unpaired surrogates escaped.

    The function is idempotent: a replay applies the function again and requires the same text.
    """
    return text[:MAX_ERROR_CHARS].encode("utf-8", "backslashreplace").decode()[:MAX_ERROR_CHARS]
