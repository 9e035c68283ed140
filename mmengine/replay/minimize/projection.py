"""Removes whole requests from a log's events, without deriving decisions again.

A record has values for many rows; a row is a running request's slot in the batch. While the whole log is
applied to a state, each record is split by row. The projection then builds the smaller log's events from the
remaining requests' values. Rows and blocks keep their numbers. A step without rows disappears, so later steps
get smaller numbers.
"""

from dataclasses import dataclass, field

import msgspec
import numpy as np

from mmengine.core.state.blocks import further_blocks
from mmengine.core.state.state import State
from mmengine.events import vocabulary as ev
from mmengine.events.codec import Record

NO_ROWS = np.zeros(0, np.intp)


@dataclass(frozen=True, slots=True)
class Share:
    """An int32 column with a varying number of values per row. The values of row n are `values[ends[n - 1] :
    ends[n]]`.
    """

    values: np.ndarray
    ends: np.ndarray

    def of(self, places: np.ndarray) -> bytes:
        """Return the values for the rows at these indices, as bytes."""
        starts = np.concatenate(([0], self.ends[:-1]))
        return b"".join(
            self.values[start:end].tobytes()
            for start, end in zip(starts[places].tolist(), self.ends[places].tolist(), strict=True)
        )


@dataclass(frozen=True, slots=True)
class Piece:
    """A record, split by row. `rows`: the record's row numbers, intp. `owners`: the id of each row's
    request; for PREEMPTED, the id of the request in row `for_row`; () for EXECUTED and for records that are
    not split. `shares`: the columns by field name.
    """

    record: Record
    event: ev.Event
    rows: np.ndarray = field(default_factory=lambda: NO_ROWS)
    owners: tuple[str, ...] = ()
    shares: dict[str, Share] = field(default_factory=dict)

    @property
    def num_cells(self) -> int:
        """The number of array elements and request ids that the piece stores in addition to the event."""
        shares = self.shares.values()
        return len(self.rows) + len(self.owners) + sum(len(one.values) + len(one.ends) for one in shares)


def piece_of(state: State, record: Record) -> Piece:
    """Return a record split by row. `state`: the state before the record. Raises an error for a record that
    the state does not allow.
    """
    event = record.event
    match event:
        case ev.Queued():
            return Piece(record, state.grammar_slots.whole(event))
        case ev.Scheduled():
            return _scheduled(state, record, event)
        case ev.Executed():
            return _executed(state, record, event)
        case ev.StatesKept():
            rows = _ints(event.rows).astype(np.intp)
            shares = {name: _each(_ints(getattr(event, name))) for name in ("num_tokens", "slots")}
            return Piece(record, event, rows, _owners(state, rows), shares)
        case ev.Drafted():
            rows, counts = _ints(event.rows).astype(np.intp), _ints(event.num_drafts)
            shares = {"num_drafts": _each(counts), "drafts": _runs(event.drafts, counts)}
            return Piece(record, event, rows, _owners(state, rows), shares)
        case ev.Preempted(for_row=row) if row != ev.FOR_ALL:
            return Piece(record, event, owners=_owners(state, np.array([row])))
    return Piece(record, event)


def _scheduled(state: State, record: Record, event: ev.Scheduled) -> Piece:
    rows = state.last_rows if event.rows is None else _ints(event.rows).astype(np.intp)
    shares: dict[str, Share] = {}
    counts = np.ones(len(rows), np.int32)
    if event.num_tokens is not None:
        counts = _ints(event.num_tokens)
        shares["num_tokens"] = _each(counts)
    if event.new_blocks:
        needed = np.zeros(len(rows), np.int32)
        short, further = further_blocks(state, state.config, rows, counts)
        needed[short] = further
        shares["new_blocks"] = _runs(event.new_blocks, needed * state.num_groups)
    for name in ("num_drafts", "drafters"):
        if (column := getattr(event, name)) is not None:
            shares[name] = _each(_ints(column))
    return Piece(record, event, rows, _owners(state, rows), shares)


def _executed(state: State, record: Record, event: ev.Executed) -> Piece:
    rows, shares = state.sampled_rows(), dict[str, Share]()
    counts = np.ones(len(rows), np.int32)
    if event.counts is not None:
        counts = _ints(event.counts)
        shares["counts"] = _each(counts)
    shares["token_ids"] = _runs(event.token_ids, counts)
    if event.num_drafts is not None:
        num_drafts = _ints(event.num_drafts)
        shares["num_drafts"], shares["drafts"] = _each(num_drafts), _runs(event.drafts, num_drafts)
        if event.drafters is not None:
            shares["drafters"] = _each(_ints(event.drafters))
    return Piece(record, event, rows, shares=shares)


def _owners(state: State, rows: np.ndarray) -> tuple[str, ...]:
    return tuple(state.requests_by_row[row].request.request_id for row in rows.tolist())


def _ints(column: bytes) -> np.ndarray:
    return np.frombuffer(column, np.int32)


def _each(values: np.ndarray) -> Share:
    return Share(values, np.arange(1, len(values) + 1))


def _runs(column: bytes, counts: np.ndarray) -> Share:
    """Return the Share for a column with `counts[n]` values for row n."""
    return Share(_ints(column), np.cumsum(counts, dtype=np.int64))


class Projection:
    """Converts pieces to the events of a smaller log with only the requests `kept`. `state`: the smaller
    log's state. The caller applies each event to this state.
    """

    def __init__(self, state: State, kept: set[str]):
        self._state, self._kept = state, kept
        self._steps: set[int] = set()  # Steps that are in flight in both logs.
        self._evicted: list[bytes] = []  # Encoder outputs that removed requests evicted.

    def of(self, piece: Piece) -> ev.Event | None:
        """Return the piece's event without the removed requests, or None if nothing remains. Raises KeyError
        if the smaller log's state samples a row that is missing in the piece.
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
                places = self._places(piece)
                rows = piece.rows[places].astype(np.int32).tobytes()
                columns = {name: share.of(places) for name, share in piece.shares.items()}
                return msgspec.structs.replace(event, rows=rows, **columns) if rows else None
            case ev.Evicted():
                keys = self._cached(event.keys)
                return ev.Evicted(keys, self._cached(event.used)) if keys or event.used else None
        name = getattr(event, "request_id", None)
        if name is None or name in self._kept:
            return self._own(piece, event)
        self._evicted += getattr(event, "evict", ())
        return None

    def _own(self, piece: Piece, event: ev.Event) -> ev.Event:
        """Return the event of a remaining request or of the whole engine, without references to removed
        requests.
        """
        replace = msgspec.structs.replace
        match event:
            case ev.Queued():
                return replace(event, group=event.group if event.group in self._kept else "")
            case ev.Admitted():
                if isinstance(event, ev.AdmittedWithAdapter):
                    there = self._state.adapters.cache.entries
                    out = tuple(key for key in event.adapters_out if key in there)
                    event = replace(event, adapters_out=out)
                return replace(event, evict=self._all_evicted(event.evict))
            case ev.Encoded():
                return replace(event, evict=self._all_evicted(event.evict))
            case ev.Preempted() if not self._kept.issuperset(piece.owners):
                return replace(event, for_row=ev.FOR_ALL, for_tokens=0)
        return event

    def _scheduled(self, piece: Piece, event: ev.Scheduled) -> ev.Scheduled | None:
        places = self._places(piece)
        if not len(places):
            self._evicted += event.evict
            return None
        rows = piece.rows[places]
        return msgspec.structs.replace(
            event,
            rows=rows.astype(np.int32).tobytes(),
            encode=tuple(item for item in event.encode if item[1] in rows),
            evict=self._all_evicted(event.evict),
            num_decided=0,
            **{name: share.of(places) for name, share in piece.shares.items()},
        )

    def _executed(self, piece: Piece, event: ev.Executed) -> ev.Executed:
        number_of = {row: number for number, row in enumerate(piece.rows.tolist())}
        numbers = [number_of[row] for row in self._state.sampled_rows().tolist()]
        index = {number: place for place, number in enumerate(numbers)}
        places = np.array(numbers, np.intp)
        return msgspec.structs.replace(
            event,
            stops=tuple((index[number], kind) for number, kind in event.stops if number in index),
            errors=tuple((index[number], text) for number, text in event.errors if number in index),
            logprobs=(),
            prompt_logprobs=(),
            pooled=tuple(one for one in event.pooled if one[0] in self._state.pooled_rows()),
            **{name: share.of(places) for name, share in piece.shares.items()},
        )

    def _returns(self, piece: Piece) -> bool:
        """Return whether the smaller log contains the step whose result is in the piece."""
        if not self._state.flights:
            return self._state.is_open
        if piece.record.step not in self._steps:
            return False
        self._steps.discard(piece.record.step)
        return True

    def _places(self, piece: Piece) -> np.ndarray:
        places = [place for place, name in enumerate(piece.owners) if name in self._kept]
        return np.array(places, np.intp)

    def _all_evicted(self, keys: tuple[bytes, ...]) -> tuple[bytes, ...]:
        """Return the encoder outputs that an event evicts. These are the event's own `keys` and the outputs
        that removed requests evicted earlier.
        """
        idle = self._state.encoder.idle
        now = tuple(key for key in dict.fromkeys((*self._evicted, *keys)) if key in idle)
        self._evicted = [
            key for key in self._evicted if key in self._state.encoder.entries and key not in now
        ]
        return now

    def _cached(self, keys: tuple[bytes, ...]) -> tuple[bytes, ...]:
        return tuple(key for key in keys if key in self._state.encoder.entries)
