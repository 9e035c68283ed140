"""Leaves whole requests out of a log's recorded events, without deciding again.

A record is split into the shares of its rows while the whole log is folded. The projection puts the shares of
the remaining requests together again, on the state of a log that has only these requests. Rows and blocks
keep their numbers. A step without a row disappears, so later steps get smaller numbers.
"""

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from mmengine.core.state.blocks import further_blocks
from mmengine.core.state.state import State
from mmengine.events import vocabulary as ev
from mmengine.events.codec import Record


@dataclass(frozen=True, slots=True)
class Piece:
    """A record, and the shares of its rows. `owners` has the id of each row's request.

    `columns`: for each int32 column of the event, the values of each row, keyed by the field's name.
    """

    record: Record
    event: ev.Event
    owners: dict[int, str] = field(default_factory=dict)
    columns: dict[str, dict[int, np.ndarray]] = field(default_factory=dict)


def piece_of(state: State, record: Record) -> Piece:
    """Split a record. `state`: the state before the record. Raises an error for an impossible record."""
    event = record.event
    match event:
        case ev.Queued():
            return Piece(record, state.grammar_slots.whole(event))
        case ev.Scheduled():
            return _scheduled(state, record, event)
        case ev.Executed():
            return _executed(state, record, event)
        case ev.StatesKept() | ev.Drafted():
            rows = _ints(event.rows)
            if isinstance(event, ev.Drafted):
                counts = _ints(event.num_drafts)
                columns = {"num_drafts": _each(rows, counts), "drafts": _runs(rows, event.drafts, counts)}
            else:
                columns = {name: _each(rows, _ints(getattr(event, name))) for name in ("num_tokens", "slots")}
            return Piece(record, event, _owners(state, rows), columns)
        case ev.Preempted(for_row=row) if row != ev.FOR_ALL:
            return Piece(record, event, _owners(state, np.array([row])))
    return Piece(record, event)


def _scheduled(state: State, record: Record, event: ev.Scheduled) -> Piece:
    rows = state.last_rows if event.rows is None else _ints(event.rows).astype(np.intp)
    counts = np.ones(len(rows), np.int32) if event.num_tokens is None else _ints(event.num_tokens)
    short, further = further_blocks(state, state.config, rows, counts)
    needed = np.zeros(len(rows), np.int32)
    needed[short] = further
    columns = {"num_tokens": _each(rows, counts), "new_blocks": _runs(rows, event.new_blocks, needed)}
    for name in ("num_drafts", "drafters"):
        if (column := getattr(event, name)) is not None:
            columns[name] = _each(rows, _ints(column))
    return Piece(record, event, _owners(state, rows), columns)


def _executed(state: State, record: Record, event: ev.Executed) -> Piece:
    rows = state.sampled_rows()
    counts = np.ones(len(rows), np.int32) if event.counts is None else _ints(event.counts)
    columns = {"token_ids": _runs(rows, event.token_ids, counts), "counts": _each(rows, counts)}
    places = np.arange(len(rows), dtype=np.int32)
    columns["index"] = _each(rows, places)
    if event.num_drafts is not None:
        num_drafts = _ints(event.num_drafts)
        columns["num_drafts"] = _each(rows, num_drafts)
        columns["drafts"] = _runs(rows, event.drafts, num_drafts)
        if event.drafters is not None:
            columns["drafters"] = _each(rows, _ints(event.drafters))
    return Piece(record, event, {}, columns)


def _owners(state: State, rows: np.ndarray) -> dict[int, str]:
    return {row: state.requests_by_row[row].request.request_id for row in rows.tolist()}


def _ints(column: bytes) -> np.ndarray:
    return np.frombuffer(column, np.int32)


def _each(rows: np.ndarray, values: np.ndarray) -> dict[int, np.ndarray]:
    return {row: values[place : place + 1] for place, row in enumerate(rows.tolist())}


def _runs(rows: np.ndarray, column: bytes, counts: np.ndarray) -> dict[int, np.ndarray]:
    """Return each row's part of a column in which row n has `counts[n]` values."""
    values, ends = _ints(column), np.cumsum(counts, dtype=np.int64).tolist()
    pairs = zip(rows.tolist(), ends, counts.tolist(), strict=True)
    return {row: values[end - count : end] for row, end, count in pairs}


class Projection:
    """Turns pieces into the events of a log with the requests `kept` only. `state`: that log's state, which
    the caller advances by each event.
    """

    def __init__(self, state: State, kept: set[str]):
        self._state, self._kept = state, kept
        self._steps: set[int] = set()  # Steps of the whole log that are in flight here, too.

    def of(self, piece: Piece) -> ev.Event | None:
        """Return the piece's event without the other requests, or None if nothing remains. Raises KeyError if
        this log's state has a row that the piece does not have.
        """
        event, state = piece.event, self._state
        match event:
            case ev.Checkpoint() | ev.Stalled():
                return None
            case ev.Scheduled():
                return self._scheduled(piece, event)
            case ev.Executed():
                return self._executed(piece, event) if self._returns(piece) else None
            case ev.Failed():
                returns = self._returns(piece)
                self._steps.clear()
                return event if returns else None
            case ev.Dispatched():
                if state.is_open:
                    self._steps.add(piece.record.step)
                return event if state.is_open else None
            case ev.Recovered():
                self._steps.clear()
                lost = tuple((name, why) for name, why in event.lost if name in self._kept)
                return msgspec.structs.replace(event, lost=lost)
            case ev.StatesKept() | ev.Drafted():
                rows = self._rows(piece)
                columns: dict[str, Any] = {
                    name: _joined(values, rows) for name, values in piece.columns.items()
                }
                return msgspec.structs.replace(event, rows=_column(rows), **columns) if rows else None
            case ev.Evicted():
                keys = self._cached(event.keys)
                return ev.Evicted(keys, self._cached(event.used)) if keys or event.used else None
        if getattr(event, "request_id", None) in (None, *self._kept):
            return self._own(piece, event)
        return None

    def _own(self, piece: Piece, event: ev.Event) -> ev.Event:
        """Return an event of a remaining request, or an event of the whole engine."""
        replace = msgspec.structs.replace
        match event:
            case ev.Queued():
                return replace(event, group=event.group if event.group in self._kept else "")
            case ev.Admitted():
                changes: dict[str, Any] = {"evict": self._cached(event.evict)}
                if isinstance(event, ev.AdmittedWithAdapter):
                    there = self._state.adapters.cache.entries
                    changes["adapters_out"] = tuple(key for key in event.adapters_out if key in there)
                return replace(event, **changes)
            case ev.Encoded():
                return replace(event, evict=self._cached(event.evict))
            case ev.Preempted() if piece.owners.keys() and not self._kept.issuperset(piece.owners.values()):
                return replace(event, for_row=ev.FOR_ALL, for_tokens=0)
        return event

    def _scheduled(self, piece: Piece, event: ev.Scheduled) -> ev.Scheduled | None:
        rows = self._rows(piece)
        encode = tuple(item for item in event.encode if item[1] in rows)
        if not rows:
            return None
        columns: dict[str, Any] = {name: _joined(values, rows) for name, values in piece.columns.items()}
        evict = self._cached(event.evict)
        return ev.Scheduled(_column(rows), encode=encode, evict=evict, **columns)

    def _executed(self, piece: Piece, event: ev.Executed) -> ev.Executed:
        rows = self._state.sampled_rows().tolist()
        columns: dict[str, Any] = {name: _joined(values, rows) for name, values in piece.columns.items()}
        index = {
            int(values[0]): place for place, values in enumerate(piece.columns["index"][row] for row in rows)
        }
        del columns["index"]
        if event.counts is None:
            del columns["counts"]
        return ev.Executed(
            stops=tuple((index[place], kind) for place, kind in event.stops if place in index),
            errors=tuple((index[place], text) for place, text in event.errors if place in index),
            device_ns=event.device_ns,
            draft_ns=event.draft_ns,
            host_ns=event.host_ns,
            **columns,
        )

    def _returns(self, piece: Piece) -> bool:
        """Return whether the step whose result the piece has exists in this log."""
        if not self._state.flights:
            return self._state.is_open
        if piece.record.step not in self._steps:
            return False
        self._steps.discard(piece.record.step)
        return True

    def _rows(self, piece: Piece) -> list[int]:
        return [row for row, name in piece.owners.items() if name in self._kept]

    def _cached(self, keys: tuple[bytes, ...]) -> tuple[bytes, ...]:
        return tuple(key for key in keys if key in self._state.encoder.entries)


def _joined(values: dict[int, np.ndarray], rows: list[int]) -> bytes:
    return b"".join(values[row].tobytes() for row in rows)


def _column(rows: list[int]) -> bytes:
    return np.array(rows, np.int32).tobytes()
