"""Converts entries, recorded during many steps, to events. A single call hashes all entries' token ids."""

from collections.abc import Iterator

import numpy as np
from msgspec.structs import replace

from mmengine.events import vocabulary as ev
from mmengine_vllm.columns import int32_bytes, intp_array, intp_of
from mmengine_vllm.contents import PseudoIds
from mmengine_vllm.entries import Admission, Arrival, Decision, Drafts, Entry, Preemption, Result, Stamped
from mmengine_vllm.runner_order import RunnerOrder

_Columns = Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]  # For each result: rows, order, tokens.


def events_of(
    entries: list[Stamped], contents: PseudoIds, order: RunnerOrder
) -> list[tuple[ev.Event, int, int]]:
    """Return the events for `entries`, in order, each with its step and time.

    Callers must pass each entry exactly once and in order. `contents` tracks every row's hash state, and
    `order` tracks the model runner's last batch.
    """
    columns = _columns([entry for entry, _, _ in entries if isinstance(entry, Result)], order)
    hashed = [_sums(entry, contents, columns) for entry, _, _ in entries]
    parts = [sums for sums in hashed if sums is not None]
    ids = contents.ids(np.concatenate(parts)).tobytes() if parts else b""
    events, at = [], 0
    for (entry, step, ns), sums in zip(entries, hashed, strict=True):
        if sums is None:
            events.append((_event(entry, b""), step, ns))
        else:
            end = at + 4 * len(sums)
            events.append((_event(entry, ids[at:end]), step, ns))
            at = end
    return events


def _columns(results: list[Result], order: RunnerOrder) -> _Columns:
    """Yield each result's rows, the rows in token order, and the tokens."""
    rows = intp_of(b"".join([each.rows for each in results]))
    by_runner = intp_of(b"".join([order.rows_of(each) for each in results]))
    tokens = np.frombuffer(b"".join([each.tokens for each in results]), np.int64)
    begin = first = 0
    for each in results:
        end, last = begin + len(each.rows) // 4, first + len(each.tokens) // 8
        yield rows[begin:end], by_runner[begin:end], tokens[first:last]
        begin, first = end, last


def _sums(entry: object, contents: PseudoIds, columns: _Columns) -> np.ndarray | None:
    """Update the rows' hash states for an entry, and return the hash sums for the entry's token ids."""
    if isinstance(entry, Result):
        rows, order, tokens = next(columns)
        if entry.counts is None:
            sums = contents.one_each(rows, tokens, None if entry.names is None else order)
        else:
            sums = contents.runs(rows, tokens, intp_array(entry.counts), keep=True)
        for row, tracked in entry.stale:
            tracked.chain = contents.leave(row)
        return sums
    if isinstance(entry, Drafts):
        return contents.runs(intp_of(entry.rows), entry.tokens, intp_array(entry.counts), keep=False)
    if isinstance(entry, Admission):
        contents.admit(entry.event.row, entry.tracked.chain)
    elif isinstance(entry, Preemption):
        entry.tracked.chain = contents.leave(entry.event.row)
    elif isinstance(entry, Arrival):
        sums, entry.tracked.chain = contents.begin(entry.tokens, entry.salt)
        return sums
    return None


def _event(entry: Entry, ids: bytes) -> ev.Event:
    if isinstance(entry, Decision):
        return ev.Scheduled(
            rows=entry.rows,
            num_tokens=None if entry.num_tokens is None else int32_bytes(entry.num_tokens),
            new_blocks=int32_bytes(entry.new_blocks),
            encode=entry.encode,
            num_drafts=None if entry.num_drafts is None else int32_bytes(entry.num_drafts),
            block_counts=None if entry.block_counts is None else int32_bytes(entry.block_counts),
        )
    if isinstance(entry, Result):
        return ev.Executed(
            ids,
            entry.stops,
            entry.errors,
            device_ns=entry.device_ns,
            counts=None if entry.counts is None else int32_bytes(entry.counts),
            host_ns=entry.host_ns,
        )
    if isinstance(entry, Arrival):
        return replace(entry.queued, prompt=ids)
    if isinstance(entry, Drafts):
        return ev.Drafted(entry.rows, int32_bytes(entry.counts), ids)
    return entry.event if isinstance(entry, (Admission, Preemption)) else entry
