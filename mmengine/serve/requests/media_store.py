"""Stores live requests' images and videos beside the log, so that a restarted engine can resume the requests.

    <log folder>/media/<hex of mm_hash>.media
    magic "MMMD" u32 | version u16 | kind u16 | meta length u32 | reserved u32 | data length u64 |
    crc32 u32 of meta and data | meta (msgpack) | data

Kind 1: the caller's encoded bytes and options. Kind 2: patches (uint8), if the caller passed decoded pixels.
Only the owner may read the files. A file is complete before its request is logged, and is removed when no
live request needs it.
"""

import os
import struct
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from mmengine.errors import InvalidMedia, LogError, QueueFull
from mmengine.events.file_system import open_file
from mmengine.events.reserve import FULL
from mmengine.models.plugin import MediaInput, MediaSource, Processor
from mmengine.request import MediaItem

SUFFIX = ".media"
MAGIC, VERSION = b"MMMD", 1
ENCODED, PATCHES = 1, 2
HEADER = struct.Struct("<4sHHIIQI")
MAX_META = 2**16  # maximum size of `meta` in bytes
_CHUNK = 2**20


class MediaStore:
    """Manages the media files in a folder, with at most `max_bytes` in total. Not thread-safe.

    Raises LogError if the folder cannot be used.
    """

    def __init__(self, folder: Path, max_bytes: int):
        self._folder, self._max_bytes = folder, max_bytes
        self._holders: dict[bytes, set[str]] = {}  # request ids by mm_hash
        self._held: dict[str, tuple[bytes, ...]] = {}
        self._sizes: dict[bytes, int] = {}
        self.num_bytes = 0
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for path in folder.iterdir():
                self._take_stock(path)
        except OSError as error:
            raise LogError(f"the media store {folder} cannot be used: {error.strerror}") from None

    def _take_stock(self, path: Path) -> None:
        """Count a complete file that an earlier process wrote; remove an incomplete file."""
        try:
            mm_hash = bytes.fromhex(path.name.removesuffix(SUFFIX))
        except ValueError:
            mm_hash = b""
        if path.suffix == SUFFIX and len(mm_hash) == 32 and path.is_file() and not path.is_symlink():
            self._sizes[mm_hash] = path.stat().st_size
            self.num_bytes += self._sizes[mm_hash]
        elif path.name.endswith(f"{SUFFIX}.tmp"):
            path.unlink()

    def hold(self, request_id: str, media: Sequence[MediaInput]) -> None:
        """Store a request's media until `release`.

        Raises QueueFull if the media do not fit in the store or on the disk, and LogError if they cannot be
        written. After an error, the store keeps no media for the request.
        """
        self.hold_stored(request_id, [one.item for one in media])
        try:
            for one in media:
                if one.item.mm_hash not in self._sizes:
                    self._write(one)
        except BaseException:
            self.release(request_id)
            raise

    def hold_stored(self, request_id: str, items: Iterable[MediaItem]) -> None:
        """Mark media as needed by a request, without writing files.

        An earlier process has written the files, or the caller writes them next.
        """
        hashes = tuple(dict.fromkeys(item.mm_hash for item in items))
        self._held[request_id] = hashes
        for mm_hash in hashes:
            self._holders.setdefault(mm_hash, set()).add(request_id)

    def keep(self, holder: str, items: Iterable[MediaItem], new: Sequence[MediaInput]) -> None:
        """Mark exactly `items` as needed by `holder` (a request or a session), and release the holder's other
        items.

        `new` has the data for items that may not be stored yet.

        Raises the same errors as `hold`. After an error, the holder's earlier items stay in the store.
        """
        before = self._held.get(holder, ())
        self.hold_stored(holder, items)
        try:
            for one in new:
                if one.item.mm_hash not in self._sizes:
                    self._write(one)
        except BaseException:
            self._let_go(holder, self._held[holder], before)
            self._held[holder] = before
            raise
        self._let_go(holder, before, self._held[holder])

    def _let_go(self, holder: str, hashes: Iterable[bytes], but: Iterable[bytes]) -> None:
        for mm_hash in set(hashes).difference(but):
            self._holders[mm_hash].discard(holder)
            if not self._holders[mm_hash]:
                del self._holders[mm_hash]
                self._drop(mm_hash)

    def release(self, request_id: str) -> None:
        """Release an ended request's media. An unknown id is no error."""
        self._let_go(request_id, self._held.pop(request_id, ()), ())

    def sweep(self) -> None:
        """Remove the files that no request or session needs."""
        for mm_hash in [mm_hash for mm_hash in self._sizes if mm_hash not in self._holders]:
            self._drop(mm_hash)

    def load(self, item: MediaItem, processor: Processor) -> MediaInput:
        """Load a stored item. Raises InvalidMedia if the item's file is missing or damaged."""
        path = self._path(item.mm_hash)
        try:
            with _open(path) as file:
                kind, meta, length = _read_head(file, item)
                if kind == PATCHES:
                    return _patches(file, item, meta, length)
                _check_sum(file, item)
        except OSError as error:
            reason = (
                "it is not in the media store" if isinstance(error, FileNotFoundError) else error.strerror
            )
            raise InvalidMedia(f"the {item.modality} of the request is lost: {reason}") from None
        options = meta if isinstance(meta, dict) else {}
        return processor.restore(item, _stored_source(path, item, options, length))

    def _path(self, mm_hash: bytes) -> Path:
        return self._folder / f"{mm_hash.hex()}{SUFFIX}"

    def _drop(self, mm_hash: bytes) -> None:
        size = self._sizes.pop(mm_hash, None)
        if size is not None:
            self.num_bytes -= size
            with suppress(OSError):  # the next process removes a file that could not be removed here
                self._path(mm_hash).unlink()

    def _write(self, media: MediaInput) -> None:
        path = self._path(media.item.mm_hash)
        partial = path.with_name(path.name + ".tmp")
        try:
            fd = open_file(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            with open(fd, "wb") as file:
                size = self._write_file(file, media)
            os.replace(partial, path)
        except OSError as error:
            with suppress(OSError):
                partial.unlink()
            what = f"the media store {self._folder} cannot be written: {error.strerror}"
            if error.errno in FULL:  # other requests may end and make room
                raise QueueFull(f"{what}; try again later") from None
            raise LogError(what) from None
        except BaseException:
            with suppress(OSError):
                partial.unlink()
            raise
        self._sizes[media.item.mm_hash] = size
        self.num_bytes += size

    def _write_file(self, file: BinaryIO, media: MediaInput) -> int:
        """Write the file and return its size. Raises QueueFull."""
        source = media.source
        if source is None:
            kind, meta = PATCHES, msgspec.msgpack.encode(media.patches.shape)
            pieces: Iterable[Any] = [np.ascontiguousarray(media.patches).reshape(-1).data]
        else:
            kind, meta = ENCODED, msgspec.msgpack.encode(source.options)
            pieces = [source.data] if isinstance(source.data, bytes) else _chunks(source.data)
        room = self._max_bytes - self.num_bytes
        file.write(bytes(HEADER.size) + meta)
        crc, length = zlib.crc32(meta), 0
        for piece in pieces:
            length += len(piece)
            if HEADER.size + len(meta) + length > room:
                raise QueueFull(
                    f"the media store holds {self.num_bytes} of {self._max_bytes} bytes (media_store_bytes) "
                    "and has no room for this request: try again later, or raise the limit"
                )
            crc = zlib.crc32(piece, crc)
            file.write(piece)
        file.seek(0)
        file.write(HEADER.pack(MAGIC, VERSION, kind, len(meta), 0, length, crc))
        return HEADER.size + len(meta) + length


def _chunks(path: Path) -> Iterable[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_CHUNK):
            yield piece


def _open(path: Path) -> BinaryIO:
    return open(open_file(path, os.O_RDONLY), "rb")


def _read_head(file: BinaryIO, item: MediaItem) -> tuple[int, Any, int]:
    """Return kind, meta and data length."""
    head = file.read(HEADER.size)
    if len(head) == HEADER.size:
        magic, version, kind, meta_length, _, length, _ = HEADER.unpack(head)
        whole = os.fstat(file.fileno()).st_size == HEADER.size + meta_length + length
        if (
            magic == MAGIC
            and version == VERSION
            and kind in (ENCODED, PATCHES)
            and whole
            and meta_length <= MAX_META
        ):
            with suppress(msgspec.MsgspecError):
                return kind, msgspec.msgpack.decode(file.read(meta_length)), length
    raise _damaged(item)


def _check_sum(file: BinaryIO, item: MediaItem) -> None:
    file.seek(0)
    expected, crc = HEADER.unpack(file.read(HEADER.size))[-1], 0
    while piece := file.read(_CHUNK):
        crc = zlib.crc32(piece, crc)
    if crc != expected:
        raise _damaged(item)


def _patches(file: BinaryIO, item: MediaItem, shape: Any, length: int) -> MediaInput:
    _check_sum(file, item)
    fits = isinstance(shape, list) and len(shape) == 2 and all(type(n) is int and n > 0 for n in shape)
    if not fits or shape[0] * shape[1] != length:
        raise _damaged(item)
    file.seek(-length, os.SEEK_END)
    return MediaInput(item, np.frombuffer(file.read(length), np.uint8).reshape(shape))


def _stored_source(path: Path, item: MediaItem, options: dict[str, Any], length: int) -> MediaSource:
    """Return a source for the encoded bytes. The bytes are in memory even if the caller had passed a file."""
    with _open(path) as file:
        file.seek(-length, os.SEEK_END)
        return MediaSource(file.read(length), options)


def _damaged(item: MediaItem) -> InvalidMedia:
    return InvalidMedia(f"the {item.modality} of the request is lost: its file in the media store is damaged")
