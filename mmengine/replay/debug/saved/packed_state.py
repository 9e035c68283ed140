"""A copy of a state that is packed like a snapshot (core/snapshot), except that its live requests are in a
table that all copies share (request_table.py).
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import zstandard

from mmengine.core.snapshot import snapshot
from mmengine.core.snapshot.body import Body
from mmengine.core.snapshot.saving import body_without_requests
from mmengine.core.state.state import State
from mmengine.errors import CorruptLog
from mmengine.events import vocabulary as ev
from mmengine.replay.debug.saved.live_requests import LiveRequests

MAX_STATE_BYTES = 2**30  # Maximum size of an unpacked copy.
OBJECT_BYTES = 256  # Size in memory of a copy's objects.

_decoder = msgspec.msgpack.Decoder(Body)


class PackedState:
    """A copy of a state. `live`: the description of its live requests, which are in `requests`. `base`: an
    earlier copy, whose content `data` does not repeat, or None. A large block pool, for example, differs
    little between states.
    """

    __slots__ = ("base", "data", "live", "requests", "unpacked_base")

    def __init__(self, data: bytes, live: bytes, requests: LiveRequests, base: "PackedState | None" = None):
        self.data, self.live, self.requests, self.base = data, live, requests, base
        self.unpacked_base = b""  # the body of a base, while later copies use it

    @classmethod
    def of(
        cls,
        state: State,
        started: ev.Started,
        position: int,
        requests: LiveRequests,
        base: "PackedState | None" = None,
    ) -> "PackedState":
        """Return a copy. If a small copy results from `base`, the copy uses `base`; otherwise later copies
        can use the copy as their base.
        """
        live = requests.describe(state)
        packed = msgspec.msgpack.encode(body_without_requests(state, started, position - 1))
        data = zstandard.compress(packed, 1)
        if base is not None:
            delta = zstandard.ZstdCompressor(
                dict_data=_dictionary(base.unpacked_base or base.unpacked()),
                compression_params=_delta_of(packed),
            ).compress(packed)
            if 2 * len(delta) < len(base.data):
                return cls(delta, live, requests, base)
        copy = cls(data, live, requests)
        copy.unpacked_base = packed
        return copy

    @property
    def num_bytes(self) -> int:
        return len(self.data) + len(self.live) + OBJECT_BYTES

    def unpacked(self) -> bytes:
        """Return the copy's body. Raises CorruptLog for damaged bytes."""
        if self.base is None:
            return unpacked(self.data)
        return unpacked(self.data, self.base.unpacked_base or self.base.unpacked())

    def restore(self) -> State:
        """Return a new state object that equals the copied state. Raises CorruptLog for damaged bytes."""
        try:
            body = _decoder.decode(self.unpacked())
        except msgspec.DecodeError as error:
            raise CorruptLog(f"a saved state cannot be read: {error}") from None
        with _uncollected():
            return snapshot.filled_around(body, lambda state: self.requests.restore(self.live, state))


@contextmanager
def _uncollected() -> Iterator[None]:
    """Pause Python's garbage collector. The thousands of new objects of a long queue would start it several
    times, and it would traverse all unpacked requests each time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _dictionary(content: bytes) -> zstandard.ZstdCompressionDict:
    return zstandard.ZstdCompressionDict(content, dict_type=zstandard.DICT_TYPE_RAWCONTENT)


def _delta_of(packed: bytes) -> zstandard.ZstdCompressionParameters:
    """Return the parameters for compressing a state against another state of about equal size."""
    window = max(20, min(27, (2 * len(packed)).bit_length()))
    return zstandard.ZstdCompressionParameters.from_level(3, window_log=window, enable_ldm=True)


def unpacked(data: bytes, base: bytes = b"") -> bytes:
    """Unpack a packed state's body. Raises CorruptLog for damaged bytes."""
    try:
        if not 0 <= zstandard.frame_content_size(data) <= MAX_STATE_BYTES:
            raise zstandard.ZstdError("it claims an impossible size")
        return zstandard.ZstdDecompressor(_dictionary(base) if base else None).decompress(data)
    except zstandard.ZstdError as error:
        raise CorruptLog(f"a saved state cannot be unpacked: {error}") from None
