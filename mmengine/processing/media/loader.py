"""Loads a prompt's images and videos through a cache. The result is the patches that the encoder reads, and
their hash.

Encoded sources (bytes, a data: URL, a file) are looked up by content, so a repeated image is decoded only
once. Pixels that the caller decoded (PIL images, arrays, lists of frames) are not cached, because hashing
them costs nearly as much as preparing them.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mmengine.errors import InvalidMedia
from mmengine.models.media_cache import MediaCache
from mmengine.models.media_decoding import DecodedMedia, Encoded, EncodedMedia, FrameTimes, MediaDecoder
from mmengine.models.plugin import MediaSource
from mmengine.processing.media.images import load_rgb
from mmengine.processing.media.options import NAMES as OPTION_NAMES
from mmengine.processing.media.options import check_known, image_options, video_options
from mmengine.processing.media.settings import CheckLength, MediaSettings
from mmengine.processing.media.sources import (
    MAX_IMAGE_BYTES,
    MAX_VIDEO_BYTES,
    Access,
    MediaPart,
    is_source,
    keepable,
    read_source,
)
from mmengine.processing.media.video import MAX_LISTED_FRAMES

_ENTRY_BYTES = 1024  # Size of a cache entry without its patches.


@dataclass(frozen=True, slots=True)
class LoadedMedia:
    """A DecodedMedia with the hash of its patches. The patches (uint8) must not be changed, because all
    requests with equal content share them.
    """

    patches: np.ndarray
    grid: tuple[int, int, int]
    mm_hash: bytes
    timestamps: tuple[float, ...] = ()
    duration: float = 0.0
    tiles: tuple[int, int] = (0, 0)
    interval: float | None = None

    @property
    def num_bytes(self) -> int:
        return self.patches.nbytes + _ENTRY_BYTES


class MediaLoader:
    """Loads media through the cache. `hash_key`: identifies the encoder and the patch rules in hashes."""

    def __init__(self, settings: MediaSettings, hash_key: bytes, check_length: CheckLength) -> None:
        self.cache: MediaCache[LoadedMedia] = MediaCache()
        self.decoder: MediaDecoder | None = None  # Decodes encoded media; None: the calling thread decodes.
        self._settings, self._hash_key, self._check_length = settings, hash_key, check_length

    def load(
        self, part: MediaPart, given: Mapping[str, Any], access: Access, cache_salt: str
    ) -> tuple[LoadedMedia, MediaSource | None]:
        """Return a part's media, and a source from which `restore` can load equal media. The source is None
        for pixels that the caller decoded. Raises InvalidMedia, InvalidRequest.
        """
        check_known(given, self._settings.options, part.where)
        source = _source_of(part, given, access)
        if source is None:
            return self._load(part, given, access), None
        part = replace(part, source=source.data)
        if not self.cache.max_bytes:
            return self._load(part, given, access), source
        key, stamp = _content_key(part, given, cache_salt), _stamp(source.data)
        media = self.cache.get(key, lambda: self._load(part, given, access), lambda one: one.num_bytes)
        # If the file changed during decoding, the cached pixels may not be those of the hashed contents.
        if _stamp(source.data) != stamp:
            self.cache.forget(key)
        return media, source

    def restore(self, modality: str, source: MediaSource) -> LoadedMedia:
        part = MediaPart(modality, source.data, {}, f"the stored {modality}")
        return self._load(part, source.options, Access())

    def _load(self, part: MediaPart, given: Mapping[str, Any], access: Access) -> LoadedMedia:
        encoded = None if self.decoder is None else encoded_media(part, given, access)
        if self.decoder is None or encoded is None:
            found = self.decode(part, given, access)
        else:
            found = self.decoder(encoded)
        mm_hash = self._mm_hash(part.modality, found.patches, found.grid)
        return LoadedMedia(
            found.patches,
            found.grid,
            mm_hash,
            found.timestamps,
            found.duration,
            found.tiles,
            found.interval,
        )

    def decode(self, part: MediaPart, given: Mapping[str, object], access: Access) -> DecodedMedia:
        """Decode media on the calling thread. Raises InvalidMedia, InvalidRequest."""
        settings, check_length = self._settings, self._check_length
        if part.modality == "image":
            wanted = image_options(given, part.where)
            image = load_rgb(part.source, access, part.where)
            return settings.prepare_image(image, wanted, check_length, part.where)
        options = video_options(given, part.where)
        return settings.prepare_video(part.source, options, access, check_length, part.where)

    def _mm_hash(self, modality: str, rows: np.ndarray, grid: tuple[int, int, int]) -> bytes:
        digest = hashlib.sha256(self._hash_key)
        digest.update(f" {modality} {grid} ".encode())
        digest.update(rows.data)
        return digest.digest()


def _source_of(part: MediaPart, given: Mapping[str, Any], access: Access) -> MediaSource | None:
    """Return the encoded bytes and the options. For a video on disk, the file's path replaces the bytes.
    Returns None for pixels that the caller decoded.
    """
    source = part.source
    data: bytes | Path | None
    if part.modality == "image":
        data = read_source(source, access, MAX_IMAGE_BYTES, part.where) if is_source(source) else None
    else:
        source = source[0] if isinstance(source, tuple) and source else source
        data = keepable(source, access, MAX_VIDEO_BYTES, part.where)
    if data is None:
        return None
    plain = {name: given[name] for name in OPTION_NAMES if isinstance(given.get(name), (bool, int, float))}
    return MediaSource(data, plain)


def encoded_media(part: MediaPart, given: Mapping[str, object], access: Access) -> EncodedMedia | None:
    """Return the input for decoding a part in another process.

    Returns None if the caller decoded any frame. Raises InvalidMedia, InvalidRequest.
    """
    source, times = part.source, None
    if part.modality == "video" and isinstance(source, tuple) and len(source) == 2:
        source, times = source[0], _frame_times(source[1], part.where)
    data: Encoded | tuple[Encoded, ...] | None
    if part.modality == "video" and isinstance(source, (list, tuple)):
        if not source or not all(map(is_source, source)):
            return None
        data = _encoded_frames(source, access, part.where)
    elif part.modality == "video":
        data = keepable(source, access, MAX_VIDEO_BYTES, part.where)
    else:
        data = read_source(source, access, MAX_IMAGE_BYTES, part.where) if is_source(source) else None
    if data is None:
        return None
    # Raises for invalid options.
    (image_options if part.modality == "image" else video_options)(given, part.where)
    options = {
        name: value for name in OPTION_NAMES if isinstance(value := given.get(name), (bool, int, float))
    }
    return EncodedMedia(part.modality, data, options, part.where, times)


def _encoded_frames(frames: Sequence[object], access: Access, where: str) -> tuple[Encoded, ...]:
    found: list[Encoded] = []
    num_bytes = 0
    # If there are too many frames, pass only one more than allowed. The decoder then reports the error.
    for index, frame in enumerate(frames[: MAX_LISTED_FRAMES + 1]):
        name = f"{where}, frame {index}"
        data = keepable(frame, access, MAX_IMAGE_BYTES, name)
        assert data is not None  # The caller has checked that all frames are sources.
        num_bytes += len(data) if isinstance(data, bytes) else 0
        if num_bytes > MAX_VIDEO_BYTES:
            raise InvalidMedia(f"{where} is larger than {MAX_VIDEO_BYTES // 2**20} MiB; send fewer frames")
        found.append(data)
    return tuple(found)


def _frame_times(metadata: object, where: str) -> FrameTimes | None:
    """Return the times in a frame list's metadata. Raises InvalidMedia for values that are not numbers. The
    decoder reports other invalid values.
    """
    if not isinstance(metadata, Mapping):
        return None
    fps, indices, total = (metadata.get(name) for name in ("fps", "frames_indices", "total_num_frames"))
    try:
        return FrameTimes(
            None if fps is None else float(fps),
            None if indices is None else tuple(map(int, indices)),
            None if total is None else max(-1, min(int(total), 2**32)),  # The message format limits integers.
        )
    except (TypeError, ValueError, OverflowError):
        raise InvalidMedia(
            f"{where}: fps, frames_indices and total_num_frames of its metadata must be numbers"
        ) from None


def _content_key(part: MediaPart, given: Mapping[str, Any], cache_salt: str) -> bytes:
    """Return the key in the cache. Raises InvalidRequest for options outside their range, and InvalidMedia
    for a missing file.
    """
    options = (image_options if part.modality == "image" else video_options)(given, part.where)
    head = (
        json.dumps([part.modality, repr(options), cache_salt]) + "\n"
    )  # The final line break ends the head unambiguously, because JSON text contains no line breaks.
    digest = hashlib.sha256(head.encode())
    if isinstance(part.source, Path):
        try:
            with part.source.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            reason = error.strerror or "unknown reason"
            raise InvalidMedia(f"{part.where} cannot be read ({reason})") from None
    else:
        digest.update(part.source)
    return digest.digest()


def _stamp(data: bytes | Path) -> tuple[int, ...]:
    """Return a tuple that changes when the file changes."""
    if not isinstance(data, Path):
        return ()
    try:
        found = os.stat(data)
    except OSError:
        return (-1,)
    return found.st_ino, found.st_size, found.st_mtime_ns
