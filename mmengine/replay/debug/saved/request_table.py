"""Stores the live requests of a log's saved states. Each request is stored once, even if many states contain
the request.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import fields
from operator import attrgetter
from typing import NamedTuple

import msgspec
import numpy as np

from mmengine.core.snapshot.body import Known
from mmengine.core.snapshot.restoring import request_state_of
from mmengine.core.state.request_state import RequestState
from mmengine.core.state.state import State
from mmengine.errors import CorruptLog
from mmengine.replay.debug.saved.compression import compress, decompress

CHUNK_REQUESTS = 64  # Maximum number of requests that are compressed together.
CHUNK_BYTES = 2**20  # A chunk that has this size gets no further request.
MAX_DECODED_BYTES = 256 * 2**20  # Maximum size of the unpacked requests that are kept in memory.
OBJECT_BYTES = 2048  # Assumed size of an unpacked request, in addition to its content.
ENTRY_BYTES = 128  # Size in memory of a request's digest and number.

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Known)
_chunk_decoder = msgspec.msgpack.Decoder(list[bytes])
_fields = attrgetter(*(each.name for each in fields(RequestState)))


class Chunk(msgspec.Struct, array_like=True):
    """Requests that are compressed together. They have consecutive numbers from `first` on."""

    first: int
    count: int
    data: bytes


class _Unpacked(NamedTuple):
    """An unpacked request. Each state gets its own copy. `num_bytes`: the request's assumed size."""

    req_state: RequestState
    num_bytes: int


class RequestTable:
    """Requests by number. `num_bytes`: the size of all stored requests in memory."""

    def __init__(self, chunks: Iterable[Chunk] = ()):
        self._chunks = list(chunks)  # ascending by number
        self._open: list[bytes] = []  # requests that are not in a chunk yet
        self._open_bytes = 0
        last = self._chunks[-1] if self._chunks else Chunk(0, 0, b"")
        self._next = last.first + last.count
        # Maps a request's digest to its number. None until the digests of loaded chunks are computed.
        self._numbers: dict[bytes, int] | None = None if self._chunks else {}
        self._decoded: dict[int, _Unpacked] = {}  # by number; the most recently used request is last
        self._decoded_bytes = 0
        self.num_bytes = sum(len(each.data) + ENTRY_BYTES * each.count for each in self._chunks)

    def add(self, known: Known) -> int:
        """Store a request, and return its number. Equal requests get the same number."""
        packed = _encoder.encode(known)
        digest, numbers = _digest(packed), self._all_numbers()
        found = numbers.get(digest)
        if found is not None:
            return found
        number = numbers[digest] = self._next
        self._next += 1
        self._open.append(packed)
        self._open_bytes += len(packed)
        self.num_bytes += len(packed) + ENTRY_BYTES
        if len(self._open) >= CHUNK_REQUESTS or self._open_bytes >= CHUNK_BYTES:
            self._close_chunk()
        return number

    def take(self, numbers: list[int], state: State) -> list[RequestState]:
        """Return new objects for the requests with these numbers. `state`: the state to which the requests
        belong.

        Raises CorruptLog for damaged bytes, and KeyError for an unknown number.
        """
        decoded = self._decoded
        missing = [number for number in numbers if number not in decoded]
        fresh = {number: self._decode(packed, state) for number, packed in self._packed(missing)}
        found = []
        for number in numbers:
            unpacked = fresh[number] if number in fresh else decoded[number]
            req_state = RequestState(*_fields(unpacked.req_state))
            req_state.held_media = set(req_state.held_media)
            found.append(req_state)
        self._remember(numbers, fresh)
        return found

    def drop_others(self, used: np.ndarray) -> None:
        """Delete each chunk that contains no request in `used`. `used`: numbers of requests, ascending."""
        starts = np.searchsorted(used, [each.first for each in self._chunks])
        ends = np.searchsorted(used, [each.first + each.count for each in self._chunks])
        pairs = zip(self._chunks, (starts < ends).tolist(), strict=True)
        self._chunks = [chunk for chunk, is_used in pairs if is_used]
        held = {number for each in self._chunks for number in range(each.first, each.first + each.count)}
        held.update(range(self._next - len(self._open), self._next))
        if self._numbers is not None:
            self._numbers = {digest: n for digest, n in self._numbers.items() if n in held}
        self.num_bytes = sum(len(each.data) + ENTRY_BYTES * each.count for each in self._chunks)
        self.num_bytes += self._open_bytes + ENTRY_BYTES * len(self._open)

    def chunks(self) -> list[Chunk]:
        """Return all stored requests as chunks. `RequestTable(chunks)` restores the table."""
        if self._open:
            self._close_chunk()
        return self._chunks

    def _close_chunk(self) -> None:
        first, data = self._next - len(self._open), compress(_encoder.encode(self._open))
        self._chunks.append(Chunk(first, len(self._open), data))
        self.num_bytes += len(data) - self._open_bytes
        self._open, self._open_bytes = [], 0

    def _all_numbers(self) -> dict[bytes, int]:
        if self._numbers is None:
            self._numbers = {}
            for chunk in self._chunks:
                for place, packed in enumerate(_unpacked(chunk)):
                    self._numbers[_digest(packed)] = chunk.first + place
        return self._numbers

    def _packed(self, numbers: list[int]) -> Iterable[tuple[int, bytes]]:
        """Yield (number, packed request) for each of these numbers."""
        firsts = [each.first for each in self._chunks]
        place, content, first = -2, self._open, self._next - len(self._open)
        for number in sorted(numbers):
            at = -1 if number >= self._next - len(self._open) else bisect_right(firsts, number) - 1
            if at != place:
                place = at
                content = self._open if at < 0 else _unpacked(self._chunks[at])
                first = self._next - len(self._open) if at < 0 else firsts[at]
            if not 0 <= number - first < len(content):
                raise KeyError(number)
            yield number, content[number - first]

    @staticmethod
    def _decode(packed: bytes, state: State) -> _Unpacked:
        try:
            req_state = request_state_of(state, _decoder.decode(packed))
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise CorruptLog(f"a saved request cannot be read: {error}") from None
        req_state.tokens.flags.writeable = False
        return _Unpacked(req_state, OBJECT_BYTES + 2 * len(packed))

    def _remember(self, numbers: list[int], fresh: dict[int, _Unpacked]) -> None:
        """Cache the unpacked requests `fresh`, and mark the requests `numbers` as most recently used. Beyond
        MAX_DECODED_BYTES, the least recently used requests are evicted.
        """
        decoded = self._decoded
        if not fresh:
            return
        for number in numbers:
            if number not in fresh:
                decoded[number] = decoded.pop(number)
        decoded.update(fresh)
        self._decoded_bytes += sum(each.num_bytes for each in fresh.values())
        while self._decoded_bytes > MAX_DECODED_BYTES and decoded:
            self._decoded_bytes -= decoded.pop(next(iter(decoded))).num_bytes


def _unpacked(chunk: Chunk) -> list[bytes]:
    try:
        content = _chunk_decoder.decode(decompress("a chunk of saved requests", chunk.data))
    except msgspec.DecodeError as error:
        raise CorruptLog(f"a chunk of saved requests cannot be read: {error}") from None
    if len(content) != chunk.count:
        raise CorruptLog(f"{len(content)} saved requests were found instead of {chunk.count}")
    return content


def _digest(packed: bytes) -> bytes:
    return hashlib.blake2b(packed, digest_size=16).digest()
