"""Keeps in memory copies of the state at positions of a log, so that every position can be reached from a
nearby copy.

If a snapshot can hold the state, the copy is packed like a snapshot (core/snapshot). Otherwise the state
object is copied. For example, the data that vLLM's rules add to a state do not fit into a snapshot.
"""

from bisect import bisect_right
from copy import deepcopy
from typing import NamedTuple, Protocol

import numpy as np
import zstandard
from numpy.lib.stride_tricks import sliding_window_view

from mmengine.core.snapshot import snapshot
from mmengine.core.snapshot.saving import body_of
from mmengine.core.state.state import State
from mmengine.errors import CorruptLog
from mmengine.events import vocabulary as ev

EVERY_RECORDS = 1024  # Minimum number of records between two copies.
MAX_BYTES = 256 * 2**20  # Default maximum size of all copies.
MAX_STATE_BYTES = 2**30  # Maximum size of an unpacked copy.


class SavedState(Protocol):
    """A copy of a state. `num_bytes`: the copy's size."""

    @property
    def num_bytes(self) -> int: ...

    def restore(self) -> State:
        """Return a new state object that equals the copied state. Raises CorruptLog for damaged bytes."""


class PackedState:
    """A copy of a state in the form of a packed snapshot. `base`: an earlier copy, whose content `data` does
    not repeat, or None. A long queue, for example, differs little between states.
    """

    __slots__ = ("base", "data", "unpacked_base")

    def __init__(self, data: bytes, base: "PackedState | None" = None):
        self.data, self.base = data, base
        self.unpacked_base = b""  # the snapshot of a base, while later copies use it

    @classmethod
    def of(
        cls, state: State, started: ev.Started, position: int, base: "PackedState | None" = None
    ) -> "PackedState":
        """Return a copy. If a small copy results from `base`, the copy uses `base`; otherwise later copies
        can use the copy as their base.
        """
        packed = bytes(snapshot.packed(body_of(state, started, position - 1)))
        if base is not None:
            data = zstandard.ZstdCompressor(
                dict_data=_dictionary(base.unpacked_base or base.unpacked()),
                compression_params=_delta_of(packed),
            ).compress(packed)
            if 2 * len(data) < len(base.data):
                return cls(data, base)
        copy = cls(zstandard.ZstdCompressor(level=1).compress(packed))
        copy.unpacked_base = packed
        return copy

    @property
    def num_bytes(self) -> int:
        return len(self.data)

    def unpacked(self) -> bytes:
        """Return the snapshot. Raises CorruptLog for damaged bytes."""
        if self.base is None:
            return unpacked(self.data)
        return unpacked(self.data, self.base.unpacked_base or self.base.unpacked())

    def restore(self) -> State:
        return snapshot.restore(self.unpacked())[0]


def _dictionary(content: bytes) -> zstandard.ZstdCompressionDict:
    return zstandard.ZstdCompressionDict(content, dict_type=zstandard.DICT_TYPE_RAWCONTENT)


def _delta_of(packed: bytes) -> zstandard.ZstdCompressionParameters:
    """Return the parameters for compressing a state against another state of about equal size."""
    window = max(20, min(27, (2 * len(packed)).bit_length()))
    return zstandard.ZstdCompressionParameters.from_level(3, window_log=window, enable_ldm=True)


def unpacked(data: bytes, base: bytes = b"") -> bytes:
    """Unpack a packed state to a snapshot. Raises CorruptLog for damaged bytes."""
    try:
        if not 0 <= zstandard.frame_content_size(data) <= MAX_STATE_BYTES:
            raise zstandard.ZstdError("it claims an impossible size")
        return zstandard.ZstdDecompressor(_dictionary(base) if base else None).decompress(data)
    except zstandard.ZstdError as error:
        raise CorruptLog(f"a saved state cannot be unpacked: {error}") from None


class CopiedState:
    """A copy of a state's objects. The zeros at the end of each row are left out of the two
    widest columns.
    """

    def __init__(self, state: State):
        self._state = _copied(state)
        self._rows = [
            (row, _trimmed(state.token_ids[row]), _trimmed(state.block_table[row]))
            for row in range(state.config.num_rows)
        ]
        self._shapes = state.token_ids.shape, state.block_table.shape
        known = sum(len(each.tokens) for each in state.requests.values())
        kept = sum(tokens.nbytes + table.nbytes for _, tokens, table in self._rows)
        width = state.content_width
        self.num_bytes = kept + 4 * known + state.config.num_blocks * (4 * width + 64) + 65536
        self.num_bytes += state.windows.tables.nbytes

    def restore(self) -> State:
        state = _copied(self._state)
        tokens, table = (np.zeros(shape, np.int32) for shape in self._shapes)
        for row, known, blocks in self._rows:
            tokens[row, : len(known)], table[row, : len(blocks)] = known, blocks
        windows = sliding_window_view(tokens, state.content_width, axis=1)
        state.__dict__.update(
            token_ids=tokens, block_table=table, block_tokens=windows[:, :: state.config.block_size]
        )
        return state


def _trimmed(values: np.ndarray) -> np.ndarray:
    """Return a copy of the array without the zeros at the end."""
    used = np.flatnonzero(values)
    return values[: int(used[-1]) + 1 if len(used) else 0].copy()


def _copied(state: State) -> State:
    """Return a deep copy of the state without its two widest columns. Requests and settings are shared,
    because they never change.
    """
    shared = [state.config, state.constants, state.policy]
    shared += [req_state.request for req_state in state.requests.values()]
    steps = [state.step_encoded, *(flight.encoded for flight in state.flights)]
    shared += [request for encoded in steps for _, request, _ in encoded]
    memo: dict[int, object] = {id(each): each for each in shared}
    for name in ("token_ids", "block_table", "block_tokens"):
        memo[id(getattr(state, name))] = None
    return deepcopy(state, memo)


class Mark(NamedTuple):
    """A copy of the state before record `position`.

    `step`: the record's step. `time_ns`: the record's time since the log's first record. `clock_ns`: the
    number that is added to times from the record's process. `offset`: the byte in the segment at which the
    record's frame begins.
    """

    position: int
    step: int
    time_ns: int
    clock_ns: int
    offset: int
    saved: SavedState


class Marks:
    """The marks of a log, in order. `max_bytes`: maximum size of their copies. If the copies exceed this
    size, every second mark is dropped, and the distance between later marks grows.
    """

    def __init__(self, first: Mark, max_bytes: int = MAX_BYTES, every_records: int = EVERY_RECORDS):
        self.all, self._max_bytes, self.every_records = [first], max_bytes, every_records
        self._num_bytes = first.saved.num_bytes

    @property
    def last(self) -> Mark:
        return self.all[-1]

    def add(self, mark: Mark) -> None:
        """Add a mark, whose position must be after all other marks."""
        self.all.append(mark)
        self._num_bytes += mark.saved.num_bytes
        if self._num_bytes > self._max_bytes and len(self.all) > 2:
            self.all = self.all[::2]
            self.every_records *= 2
            self._num_bytes = sum(each.num_bytes for each in states_of(self.all))

    def before(self, position: int) -> Mark:
        """Return the last mark at or before a position, or the first mark."""
        return self.all[max(0, bisect_right(self.all, position, key=lambda each: each.position) - 1)]

    def after(self, position: int) -> Mark | None:
        """Return the first mark after a position, or None."""
        place = bisect_right(self.all, position, key=lambda each: each.position)
        return self.all[place] if place < len(self.all) else None


def states_of(marks: list[Mark]) -> list[SavedState]:
    """Return the marks' copies and the bases of these copies. Each is listed once, a base before
    its copies.
    """
    found: dict[int, SavedState] = {}
    for mark in marks:
        base = mark.saved.base if isinstance(mark.saved, PackedState) else None
        for each in (base, mark.saved):
            if each is not None:
                found[id(each)] = each
    return list(found.values())
