"""Stores a long log's saved states in the user's cache, so that the debugger can open the log again without
reading all records.

A cached file is used only if the log's folder, its first record, its STARTED event, its record at the last
saved state, and mmengine's version and decision rules are unchanged. The cache is not in the log's folder,
because a log from a stranger could contain false states.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from mmengine.core.decide.scheduler import DECISION_VERSION
from mmengine.errors import CorruptLog
from mmengine.events import vocabulary as ev
from mmengine.events.codec import Record
from mmengine.replay.debug.saved.live_requests import LiveRequests
from mmengine.replay.debug.saved.marks import Mark, Marks, states_of
from mmengine.replay.debug.saved.packed_state import PackedState
from mmengine.replay.debug.saved.request_table import Chunk, RequestTable
from mmengine.version import __version__

MIN_RECORDS = 100_000  # For shorter logs, no states are kept.
MAX_CACHED_BYTES = 2**30  # for all logs together; the least recently used files are deleted
_DIGEST_BYTES = 32


class _KeptMark(msgspec.Struct, array_like=True):
    """A position with a saved state. `state`: index into the kept states."""

    position: int
    step: int
    time_ns: int
    clock_ns: int
    offset: int
    state: int


class _KeptState(msgspec.Struct, array_like=True):
    """A packed state. `base`: index of the kept state against which `data` is compressed, or -1."""

    data: bytes
    live: bytes
    base: int


class _Kept(msgspec.Struct):
    """A file's content. `record`: digest of the record at the last mark. `requests`: the requests that are
    live in the states.
    """

    every_records: int
    record: bytes
    arrivals: dict[str, list[int]]
    requests: list[Chunk]
    states: list[_KeptState]
    marks: list[_KeptMark]


def cache_folder() -> Path:
    """Return the folder of the kept states, $XDG_CACHE_HOME/mmengine/debug."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if home else Path.home() / ".cache") / "mmengine" / "debug"


class KeptStates:
    """The kept states of a log. `folder`: the log's folder. `started`: the log's STARTED event. `first`: the
    log's first record number.
    """

    def __init__(self, folder: Path, started: ev.Started, first: int):
        identity = [str(folder.resolve()), __version__, str(DECISION_VERSION), str(first)]
        digest = hashlib.sha256("\0".join(identity).encode() + msgspec.msgpack.encode(started))
        self._path = cache_folder() / f"{digest.hexdigest()}.states"

    def save(self, marks: Marks, arrivals: dict[str, list[int]], last: Record) -> bool:
        """Write the marks to the cache, and return whether they could be written. `last`: the record at the
        last mark. Nothing is written if a mark's state is not a PackedState.
        """
        end = marks.last.position
        packed = [each for each in states_of(marks.all) if isinstance(each, PackedState)]
        places = {id(each): place for place, each in enumerate(packed)}
        if any(id(mark.saved) not in places for mark in marks.all):
            return False
        bases = (-1 if each.base is None else places[id(each.base)] for each in packed)
        states = [_KeptState(each.data, each.live, base) for each, base in zip(packed, bases, strict=True)]
        kept = [_KeptMark(*mark[:-1], places[id(mark.saved)]) for mark in marks.all]
        seen = {
            name: [position for position in seen_at if position < end]
            for name, seen_at in arrivals.items()
            if seen_at[0] < end
        }
        chunks = marks.requests.table.chunks()
        content = _Kept(marks.every_records, _digest_of(last), seen, chunks, states, kept)
        body = msgspec.msgpack.encode(content)
        part = self._path.with_suffix(f".{os.getpid()}")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(hashlib.sha256(body).digest() + body)
            part.replace(self._path)
            _prune(self._path.parent)
        except OSError:
            with suppress(OSError):
                part.unlink()
            return False
        return True

    def load(
        self, marks: Marks, records: Callable[[Mark], Iterator[Record]]
    ) -> tuple[dict[str, list[int]], int]:
        """Add the kept marks to `marks`. Return the arrivals (request id -> positions), and the position up
        to which the log was read. Without a valid file, return ({}, the last mark's position). `records`: a
        function that returns the log's records from a mark on.
        """
        nothing: tuple[dict[str, list[int]], int] = {}, marks.last.position
        try:
            whole = self._path.read_bytes()
            body = whole[_DIGEST_BYTES:]
            if hashlib.sha256(body).digest() != whole[:_DIGEST_BYTES]:
                return nothing
            kept = msgspec.msgpack.decode(body, type=_Kept)
        except (OSError, msgspec.DecodeError):
            return nothing
        requests = LiveRequests(RequestTable(kept.requests), marks.requests.config)
        states: list[PackedState] = []
        for each in kept.states:
            base = states[each.base] if each.base >= 0 else None
            states.append(PackedState(each.data, each.live, requests, base))
        found = [
            Mark(each.position, each.step, each.time_ns, each.clock_ns, each.offset, states[each.state])
            for each in kept.marks
        ]
        if len(found) < 2 or found[0].position != marks.last.position:
            return nothing
        try:
            record = next(records(found[-1]), None)
        except CorruptLog:  # The folder has another log, in which no record begins at this byte.
            return nothing
        if record is None or _digest_of(record) != kept.record:
            return nothing
        marks.every_records, marks.requests = kept.every_records, requests
        for mark in found[1:]:
            marks.add(mark)
        with suppress(OSError):
            os.utime(self._path)
        return kept.arrivals, found[-1].position


def _digest_of(record: Record) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(record)).digest()


def _prune(folder: Path) -> None:
    """Delete the least recently used files, until the remaining files fit into MAX_CACHED_BYTES."""
    files = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    total = 0
    for path in files:
        total += path.stat().st_size
        if total > MAX_CACHED_BYTES:
            path.unlink(missing_ok=True)
