"""Compressed copies of states, in the format of snapshots (core/snapshot). The live requests are stored in a
table that all copies share (request_table.py).
"""

import msgspec

from mmengine.core.snapshot import snapshot
from mmengine.core.snapshot.body import Body
from mmengine.core.snapshot.saving import body_without_requests
from mmengine.core.state.state import State
from mmengine.errors import CorruptLog
from mmengine.events import vocabulary as ev
from mmengine.paused_collection import paused_collection
from mmengine.replay.debug.saved.compression import compress, compress_against, decompress
from mmengine.replay.debug.saved.live_requests import LiveRequests

OBJECT_BYTES = 256  # Size in memory of a copy's objects.

_decoder = msgspec.msgpack.Decoder(Body)


class PackedState:
    """A copy of a state. `live`: describes the state's live requests, which are stored in `requests`. `data`:
    the compressed content. `base`: the earlier copy against which `data` is compressed, or None. A base makes
    `data` small, because consecutive states differ little.
    """

    __slots__ = ("base", "data", "live", "requests", "unpacked_base")

    def __init__(self, data: bytes, live: bytes, requests: LiveRequests, base: "PackedState | None" = None):
        self.data, self.live, self.requests, self.base = data, live, requests, base
        # The uncompressed content, kept while later copies are compressed against this copy; afterwards b"".
        self.unpacked_base = b""

    @classmethod
    def of(
        cls,
        state: State,
        started: ev.Started,
        position: int,
        requests: LiveRequests,
        base: "PackedState | None" = None,
    ) -> "PackedState":
        """Return a copy. The copy is compressed against `base` if the result is smaller than half the base's
        data. Otherwise the copy has no base, and can be a later copy's base.
        """
        live = requests.describe(state)
        body = msgspec.msgpack.encode(body_without_requests(state, started, position - 1))
        if base is not None:
            delta = compress_against(body, base.unpacked_base or base.unpacked())
            if 2 * len(delta) < len(base.data):
                return cls(delta, live, requests, base)
        copy = cls(compress(body), live, requests)
        copy.unpacked_base = body
        return copy

    @property
    def num_bytes(self) -> int:
        return len(self.data) + len(self.live) + OBJECT_BYTES

    def unpacked(self) -> bytes:
        """Return the copy's uncompressed content. Raises CorruptLog for damaged bytes."""
        base = b"" if self.base is None else self.base.unpacked_base or self.base.unpacked()
        return decompress("a saved state", self.data, base)

    def restore(self) -> State:
        """Return a new state object that equals the copied state. Raises CorruptLog for damaged bytes."""
        try:
            body = _decoder.decode(self.unpacked())
        except msgspec.DecodeError as error:
            raise CorruptLog(f"a saved state cannot be read: {error}") from None
        # A long queue creates thousands of objects, which each garbage collection would scan.
        with paused_collection():
            requests = self.requests
            return snapshot.filled_around(
                body, requests.config, lambda state: requests.restore(self.live, state)
            )
