"""The marks of a log: copies of the state at some positions, from which the states at all other positions are
computed. A copy is a snapshot if possible, otherwise a copied state object.
"""

from bisect import bisect_right
from typing import NamedTuple, Protocol

import numpy as np

from mmengine.core.state.state import State
from mmengine.replay.debug.saved.live_requests import LiveRequests
from mmengine.replay.debug.saved.packed_state import PackedState

EVERY_RECORDS = 512  # Minimum number of records between two copies.
MAX_BYTES = 256 * 2**20  # Default maximum size of all copies.


class SavedState(Protocol):
    """A copy of a state. `num_bytes`: the copy's size."""

    @property
    def num_bytes(self) -> int: ...

    def restore(self) -> State:
        """Return a new state object that equals the copied state. Raises CorruptLog for damaged bytes."""


class Mark(NamedTuple):
    """A copy of the state before record `position`.

    `step`: the record's step. `time_ns`: the record's time since the log's first record. `clock_ns`:
    `time_ns` minus the record's timestamp, which comes from the recording process's clock. `offset`: the
    first byte of the record's frame in the segment.
    """

    position: int
    step: int
    time_ns: int
    clock_ns: int
    offset: int
    saved: SavedState


class Marks:
    """The marks of a log, in order. `requests`: the requests to which PackedState copies refer. `max_bytes`:
    maximum size of the copies and requests together. Above this size, every second mark is dropped, and the
    distance between later marks doubles.
    """

    def __init__(self, first: Mark, requests: LiveRequests, max_bytes: int = MAX_BYTES):
        self.all, self.requests, self._max_bytes = [first], requests, max_bytes
        self.every_records = EVERY_RECORDS
        self._num_bytes = first.saved.num_bytes  # without the requests

    @property
    def num_bytes(self) -> int:
        """The size of all copies and requests."""
        return self._num_bytes + self.requests.table.num_bytes

    @property
    def last(self) -> Mark:
        return self.all[-1]

    def add(self, mark: Mark) -> None:
        """Add a mark, whose position must be after all other marks."""
        self.all.append(mark)
        self._num_bytes += mark.saved.num_bytes
        while self.num_bytes > self._max_bytes and len(self.all) > 2:
            self.all = self.all[::2]
            self.every_records *= 2
            self._num_bytes = sum(each.num_bytes for each in states_of(self.all))
            self._drop_requests()

    def _drop_requests(self) -> None:
        """Delete the requests that no mark needs."""
        requests = self.requests
        packed = (mark.saved for mark in self.all if isinstance(mark.saved, PackedState))
        used = [requests.in_use(), *(requests.numbers(saved.live) for saved in packed)]
        requests.table.drop_others(np.unique(np.concatenate(used)))

    def before(self, position: int) -> Mark:
        """Return the last mark at or before a position, or the first mark."""
        return self.all[max(0, bisect_right(self.all, position, key=lambda each: each.position) - 1)]

    def after(self, position: int) -> Mark | None:
        """Return the first mark after a position, or None."""
        place = bisect_right(self.all, position, key=lambda each: each.position)
        return self.all[place] if place < len(self.all) else None


def states_of(marks: list[Mark]) -> list[SavedState]:
    """Return the marks' copies and their bases (compression dictionaries), each once. A base precedes its
    copies.
    """
    found: dict[int, SavedState] = {}
    for mark in marks:
        base = mark.saved.base if isinstance(mark.saved, PackedState) else None
        for each in (base, mark.saved):
            if each is not None:
                found[id(each)] = each
    return list(found.values())
