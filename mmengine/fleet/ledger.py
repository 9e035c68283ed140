"""What an ingress owes answers to, on a disk: one file a request, until its answer is where it is not lost.

A request is written down when a replica's log has it and before its caller hears so. Whoever has the lock on
the folder owns all of them, and nobody else does: an ingress that ends leaves them to the next one.
"""

import hashlib
import os
import threading
from contextlib import suppress
from pathlib import Path

import msgspec

from mmengine.errors import KeepFailed, LogError, QueueFull
from mmengine.events.file_system import sync_folder, write_whole
from mmengine.events.lock import lock
from mmengine.fleet.wire import Accepted, ReplicaRequest, as_plain
from mmengine.serve.requests.operator_log import operator_log

MAX_LEDGER_BYTES = 4 * 2**30  # of requests with their media
_SUFFIX = ".request"
_NAME_BYTES = 16


class LedgerEntry(msgspec.Struct, frozen=True):
    """A request that was accepted. `ask`: as its first replica was asked. Fields are only ever added, with a
    default."""

    ask: ReplicaRequest
    begun: Accepted

    @property
    def request_id(self) -> str:
        return self.ask.request_id

    @property
    def envelope(self) -> bytes:
        """What whoever asked keeps with it."""
        found = self.ask.options.get("envelope", b"")
        return found if isinstance(found, bytes) else b""


_encode = msgspec.msgpack.Encoder(enc_hook=as_plain).encode
_decode = msgspec.msgpack.Decoder(LedgerEntry).decode


class Ledger:
    """`max_bytes`: of all that it holds. Any thread may use it. Raises LogError where another process has the
    folder, OSError where it cannot be read or written."""

    def __init__(self, folder: Path, max_bytes: int = MAX_LEDGER_BYTES):
        self.folder, self._max_bytes = folder, max_bytes
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._held: int | None = lock(folder)
        self._guard = threading.Lock()
        self._sizes: dict[str, int] = {}  # bytes by request id
        self.since = 0.0  # when the first of those that are here was written, Unix time; 0.0: none is
        self.found: dict[str, LedgerEntry] = {}  # that stood here, by request id, until somebody takes them
        try:
            for path in sorted(folder.glob(f"*{_SUFFIX}")):
                self._read(path)
        except BaseException:
            self.close()
            raise

    def _read(self, path: Path) -> None:
        data, written = path.read_bytes(), path.stat().st_mtime
        try:
            kept = _decode(data)
        except (msgspec.MsgspecError, RecursionError) as error:
            operator_log.error("a request that was kept cannot be read", file=path.name, reason=str(error))
            return
        self.found[kept.request_id] = kept
        self._sizes[kept.request_id] = len(data)
        self.since = min(self.since or written, written)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sizes

    def put(self, kept: LedgerEntry) -> None:
        """It is on the disk when this returns. Raises QueueFull, KeepFailed, LogError when it is closed."""
        data = _encode(kept)
        with self._guard:
            if self._held is None:
                raise LogError("what an ingress owes is closed, for it ends; send the request again")
            if sum(self._sizes.values()) + len(data) > self._max_bytes:
                raise QueueFull(
                    f"requests that are kept have more than {self._max_bytes} bytes; try again later"
                )
            try:
                write_whole(self._path(kept.request_id), data)
            except OSError as error:
                raise KeepFailed(
                    f"the request cannot be kept beside the logs ({error.strerror}); try again later"
                ) from None
            self._sizes[kept.request_id] = len(data)

    def drop(self, request_id: str) -> None:
        """Nobody needs its answer any more. An unknown one is no error, nor is one when it is closed, which
        stays."""
        with self._guard:
            if self._held is None or self._sizes.pop(request_id, None) is None:
                return
            self.found.pop(request_id, None)
            with suppress(OSError):  # it is answered once more, by whoever comes next
                self._path(request_id).unlink(missing_ok=True)

    def sync(self) -> None:
        """What was dropped stays so, whatever happens to this machine. Raises OSError."""
        sync_folder(self.folder)

    def close(self) -> None:
        """Let go of the folder, and of nothing in it. Closing twice is no error."""
        with self._guard:
            if self._held is not None:
                os.close(self._held)
            self._held = None

    def _path(self, request_id: str) -> Path:
        digest = hashlib.blake2b(request_id.encode(), digest_size=_NAME_BYTES).hexdigest()
        return self.folder / f"{digest}{_SUFFIX}"
