"""Reads the images, videos and options that callers pass as separate arguments, not inside the messages."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from mmengine.errors import FIELD, FieldPath, InvalidRequest, shown
from mmengine.processing.media.options import NAMES
from mmengine.processing.media.sources import MAX_MEDIA, Access


def read_arguments(
    options: Mapping[str, Any] | None, base_folder: Path | None
) -> tuple[dict[str, dict[str, Any]], Access, Sequence[Any] | None]:
    """Return the options per modality, the access to files, and the videos' metadata."""
    rest = _given(options or {}, "media_options")
    local_files = rest.pop("local_files", True)
    if not isinstance(local_files, bool):
        raise InvalidRequest(
            f"{FIELD}: local_files must be True or False, not {shown(local_files)}",
            path=FieldPath("media_options"),
        )
    access = Access(base_folder, local_files)
    metadata = rest.pop("video_metadata", None)
    of_images = _given(rest.pop("images_kwargs", {}), "images_kwargs")
    of_videos = _given(rest.pop("videos_kwargs", {}), "videos_kwargs")
    for name in (*rest, *of_images, *of_videos):
        if name not in NAMES and name != "size":
            raise InvalidRequest(
                f"{FIELD} has no {str(name)[:80]!r}; known are {', '.join(NAMES)}",
                path=FieldPath("media_options"),
            )
    by_modality = {
        "image": _sized({**rest, **of_images}, "min_pixels", "max_pixels"),
        "video": _sized({**rest, **of_videos}, "total_min_pixels", "total_pixels"),
    }
    return by_modality, access, metadata


def _given(options: Any, name: str) -> dict[str, Any]:
    if not isinstance(options, (dict, Mapping)):
        raise InvalidRequest(
            f"{FIELD} must be a dict of options, not a {type(options).__name__}", path=FieldPath(name)
        )
    return {key: value for key, value in options.items() if value is not None}


def _sized(options: dict[str, Any], least: str, most: str) -> dict[str, Any]:
    """Translate transformers' `size` to the mmengine options that limit the pixels of an image, or of all
    frames of a video together.
    """
    size = options.pop("size", None)
    if size is None:
        return options
    if not isinstance(size, Mapping) or set(size) != {"shortest_edge", "longest_edge"}:
        raise InvalidRequest(
            f"{FIELD} must be a dict of shortest_edge and longest_edge: the minimum and maximum pixels of an "
            "image, or of all frames in a video",
            path=FieldPath("size"),
        )
    return {least: size["shortest_edge"], most: size["longest_edge"], **options}


def for_item(options: dict[str, Any], number: int, where: str) -> dict[str, Any]:
    """Return the options of the item `number`. `fps` may be a list with a value for each video, because frame
    samplers return such lists.
    """
    fps = options.get("fps")
    if isinstance(fps, (list, tuple)):
        if number >= len(fps):
            raise InvalidRequest(f"{where}: fps lists only {len(fps)} values; give one per video")
        options["fps"] = fps[number]
    return options


def as_images(images: Any) -> list[Any]:
    if images is None:
        return []
    if isinstance(images, (str, bytes, Path, Image.Image)) or getattr(images, "ndim", 0) in (2, 3):
        return [images]
    return _listed(images, "images")


def as_videos(videos: Any, metadata: Any) -> list[Any]:
    """Return the videos as a list. As in transformers, a single video may be passed alone, and a list of
    images is one video.
    """
    if videos is None:
        videos = []
    single = isinstance(videos, (str, bytes, Path)) or getattr(videos, "ndim", 0) == 4
    items = [videos] if single else _listed(videos, "videos")
    if items and all(isinstance(item, Image.Image) or getattr(item, "ndim", 0) == 3 for item in items):
        items = [items]
    if metadata is None:
        return items
    metadata = [metadata] if isinstance(metadata, Mapping) else _listed(metadata, "video_metadata")
    if len(metadata) != len(items) or not all(isinstance(entry, Mapping) for entry in metadata):
        raise InvalidRequest(
            f"{FIELD} must hold one object for each of the {len(items)} videos",
            path=FieldPath("video_metadata"),
        )
    return [(item, dict(entry)) for item, entry in zip(items, metadata, strict=True)]


def _listed(items: Any, name: str) -> list[Any]:
    if not isinstance(items, Iterable):
        raise InvalidRequest(f"{FIELD} must be a list, not a {type(items).__name__}", path=FieldPath(name))
    listed = list(items)
    if len(listed) > MAX_MEDIA:
        raise InvalidRequest(
            f"{FIELD} has {len(listed)} entries; the limit for one request is {MAX_MEDIA}",
            path=FieldPath(name),
        )
    return listed
