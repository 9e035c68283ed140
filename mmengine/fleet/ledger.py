"""Stores an ingress's accepted, unanswered requests on disk, a file for each request. A file is deleted after
its answer is stored elsewhere. If the ingress ends, the next ingress takes over the requests.
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

MAX_LEDGER_BYTES = 4 * 2**30  # maximum size of all requests with their media, in bytes
_SUFFIX = ".request"
_NAME_BYTES = 16


class LedgerEntry(msgspec.Struct, frozen=True):
    """An accepted request, as its first replica received it.

    Later versions may only add fields that have a default.
    """

    request: ReplicaRequest
    accepted: Accepted

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def envelope(self) -> bytes:
        """The bytes that the caller stored with the request."""
        found = self.request.options.get("envelope", b"")
        return found if isinstance(found, bytes) else b""

    @property
    def tenant(self) -> str:
        """The tenant to which the request belongs; "" without tenants."""
        return str(self.request.options.get("tenant") or "")


_encode = msgspec.msgpack.Encoder(enc_hook=as_plain).encode
_decode = msgspec.msgpack.Decoder(LedgerEntry).decode


class Ledger:
    """A locked folder with requests, which together have at most `max_bytes` bytes. Thread-safe.

    Raises LogError if another process has locked the folder, and OSError if the folder cannot be read or
    written.
    """

    def __init__(self, folder: Path, max_bytes: int = MAX_LEDGER_BYTES):
        self.folder, self._max_bytes = folder, max_bytes
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._held: int | None = lock(folder)
        self._guard = threading.Lock()
        self._sizes: dict[str, int] = {}  # file sizes in bytes, by request id
        self.since = 0.0  # Unix time of the oldest file that the constructor found; 0.0 without files
        # an earlier ingress's entries that this ingress has neither taken over nor dropped, by request id
        self.found: dict[str, LedgerEntry] = {}
        try:
            for path in sorted(folder.glob(f"*{_SUFFIX}")):
                self._read(path)
        except BaseException:
            self.close()
            raise

    def _read(self, path: Path) -> None:
        data, written = path.read_bytes(), path.stat().st_mtime
        try:
            entry = _decode(data)
        except (msgspec.MsgspecError, RecursionError) as error:
            operator_log.error("a kept request cannot be read", file=path.name, reason=str(error))
            return
        self.found[entry.request_id] = entry
        self._sizes[entry.request_id] = len(data)
        self.since = min(self.since or written, written)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sizes

    def put(self, entry: LedgerEntry) -> None:
        """Write an entry to the disk. Raises QueueFull if the ledger is full, KeepFailed if the file cannot
        be written, and LogError if the ledger is closed.
        """
        data = _encode(entry)
        with self._guard:
            if self._held is None:
                raise LogError("the ingress is ending: send the request again")
            if sum(self._sizes.values()) + len(data) > self._max_bytes:
                raise QueueFull(
                    f"the kept requests take more than {self._max_bytes:,} bytes: try again later"
                )
            try:
                write_whole(self._path(entry.request_id), data)
            except OSError as error:
                raise KeepFailed(
                    f"the request cannot be written beside the logs ({error.strerror}): try again later"
                ) from None
            self._sizes[entry.request_id] = len(data)

    def drop(self, request_id: str) -> None:
        """Remove a request whose answer has been stored or is no longer needed.

        An unknown id is no error. After `close` this method does nothing.
        """
        with self._guard:
            if self._held is None or self._sizes.pop(request_id, None) is None:
                return
            self.found.pop(request_id, None)
            with suppress(OSError):  # if the file stays, the next ingress answers the request again
                self._path(request_id).unlink(missing_ok=True)

    def sync(self) -> None:
        """Sync the folder, so that removals survive a power cut. Raises OSError."""
        sync_folder(self.folder)

    def close(self) -> None:
        """Unlock the folder and leave its files. A second call does nothing."""
        with self._guard:
            if self._held is not None:
                os.close(self._held)
            self._held = None

    def _path(self, request_id: str) -> Path:
        digest = hashlib.blake2b(request_id.encode(), digest_size=_NAME_BYTES).hexdigest()
        return self.folder / f"{digest}{_SUFFIX}"
