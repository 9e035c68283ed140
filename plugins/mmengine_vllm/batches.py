"""Turns many steps' entries into events, and hashes the entries' token ids together."""

import numpy as np
from msgspec.structs import replace

from mmengine.events import vocabulary as ev
from mmengine_vllm.columns import int32_bytes, intp_array
from mmengine_vllm.contents import PseudoIds
from mmengine_vllm.entries import Admission, Arrival, Decision, Drafts, Entry, Preemption, Result, Stamped

_NO_IDS = np.zeros(0, np.int32)


def events_of(entries: list[Stamped], contents: PseudoIds) -> list[tuple[ev.Event, int, int]]:
    """Return the events for `entries`, in order, each with its step and time.

    Each entry must be passed once, and all entries in order, because `contents` keeps every row's hash state.
    """
    hashed = [_sums(entry, contents) for entry, _, _ in entries]
    parts = [sums for sums in hashed if sums is not None]
    ids = contents.ids(np.concatenate(parts)) if parts else _NO_IDS
    events, at = [], 0
    for (entry, step, ns), sums in zip(entries, hashed, strict=True):
        count = 0 if sums is None else len(sums)
        events.append((_event(entry, ids[at : at + count]), step, ns))
        at += count
    return events


def _sums(entry: object, contents: PseudoIds) -> np.ndarray | None:
    """Update the rows' hash states for an entry, and return the sums for the entry's token ids."""
    if type(entry) is Result:
        if entry.counts is None:
            sums = contents.one_each(entry.rows, entry.tokens)
        else:
            counts = intp_array(entry.counts)
            sums = contents.runs(entry.rows, entry.tokens, counts, keep=True)
        for row, tracked in entry.stale:
            tracked.chain = contents.leave(row)
        return sums
    if type(entry) is Drafts:
        counts = intp_array(entry.counts)
        return contents.runs(entry.rows, entry.tokens, counts, keep=False)
    if type(entry) is Admission:
        contents.admit(entry.event.row, entry.tracked.chain)
    elif type(entry) is Preemption:
        entry.tracked.chain = contents.leave(entry.event.row)
    elif type(entry) is Arrival:
        sums, entry.tracked.chain = contents.begin(entry.tokens, entry.salt)
        return sums
    return None


def _event(entry: Entry, ids: np.ndarray) -> ev.Event:
    if isinstance(entry, Decision):
        return _scheduled(entry)
    if isinstance(entry, Result):
        counts = None if entry.counts is None else int32_bytes(entry.counts)
        return ev.Executed(
            ids.tobytes(),
            entry.stops,
            entry.errors,
            device_ns=entry.device_ns,
            counts=counts,
            host_ns=entry.host_ns,
        )
    if isinstance(entry, Arrival):
        return replace(entry.queued, prompt=ids.tobytes())
    if isinstance(entry, Drafts):
        rows = entry.rows.astype(np.int32).tobytes()
        return ev.Drafted(rows, int32_bytes(entry.counts), ids.tobytes())
    return entry.event if isinstance(entry, (Admission, Preemption)) else entry


def _scheduled(entry: Decision) -> ev.Scheduled:
    return ev.Scheduled(
        rows=None if entry.rows is None else entry.rows.astype(np.int32).tobytes(),
        num_tokens=None if entry.num_tokens is None else int32_bytes(entry.num_tokens),
        new_blocks=int32_bytes(entry.new_blocks) if entry.new_blocks else b"",
        encode=entry.encode,
        num_drafts=None if entry.num_drafts is None else int32_bytes(entry.num_drafts),
        block_counts=None if entry.block_counts is None else int32_bytes(entry.block_counts),
    )
