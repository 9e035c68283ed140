"""Finds URLs and file paths of media in a prompt, and replaces them, for example by fetched bytes.

Only message fields in which processors expect media are searched.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from mmengine.errors import FIELD, FieldPath
from mmengine.processing.fetch.prompt_fetch import URL_HEADS
from mmengine.processing.media.data_urls import is_data_url

# in the order in which processors read these keys
_KEYS = ("image", "image_url", "video", "video_url", "url", "path", "base64")
_WITH_URL = ("image_url", "video_url")  # the value of these keys may be an object with a URL
_MODALITIES = {"image": "image", "image_url": "image", "video": "video", "video_url": "video"}
Message = dict[str, object]


class Place(NamedTuple):
    """A media reference's position in a prompt: as text for error messages, and as a field path."""

    text: str
    path: FieldPath

    def frame(self, number: int) -> "Place":
        return self._replace(text=f"{self.text}, frame {number}")


# Takes a reference and its position, and returns the replacement.
Replace = Callable[[str, Place], str | bytes]


def replaced(messages: Sequence[Message], replace: Replace, reads_files: bool) -> list[Message]:
    """Return the messages with each reference replaced by `replace`.

    Invalid messages stay unchanged; the processor reports them later. With `reads_files`, `file:` URLs and
    paths are references too.
    """
    walk = _Walk(replace, reads_files)
    return [walk.message(index, message) for index, message in enumerate(messages)]


def replaced_items(
    items: Sequence[object], modality: str, replace: Replace, reads_files: bool
) -> Sequence[object]:
    """Return a prompt's separate images or videos (`Prompt.images`, `Prompt.videos`) with references
    replaced.
    """
    walk = _Walk(replace, reads_files)
    if isinstance(items, (list, tuple)):
        return [walk.value(item, "", _beside(modality, number)) for number, item in enumerate(items)]
    return [walk.value(items, "", _beside(modality, 0))] if isinstance(items, str) else items


def _beside(modality: str, number: int) -> Place:
    return Place(f"{modality} {number}", FieldPath(f"{modality}s", number))


class _Walk:
    def __init__(self, replace: Replace, reads_files: bool) -> None:
        self._replace, self._reads_files = replace, reads_files
        self._counts = {"image": 0, "video": 0}

    def message(self, index: int, message: Message) -> Message:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(message, Mapping) or not isinstance(content, (list, tuple)):
            return message
        parts = [
            self._part(part, FieldPath("messages", index, "content", number))
            for number, part in enumerate(content)
        ]
        return {**message, "content": parts}

    def _part(self, part: object, path: FieldPath) -> object:
        if not isinstance(part, Mapping):
            return part
        kind = part.get("type") or next((key for key in _MODALITIES if key in part), "")
        modality = _MODALITIES.get(kind) if isinstance(kind, str) else None
        if modality is None:
            return part
        where = Place(f"{modality} {self._counts[modality]} ({FIELD})", path)
        self._counts[modality] += 1
        for key in _KEYS:
            given = part.get(key)
            if given is None or (key in _MODALITIES and _MODALITIES[key] != modality):
                continue
            if isinstance(given, Mapping) and key in _WITH_URL:
                return {**part, key: {**given, "url": self.value(given.get("url"), "url", where)}}
            return {**part, key: self.value(given, key, where)}
        return part

    def value(self, given: object, key: str, where: Place) -> object:
        if isinstance(given, str):
            return self._replace(given, where) if self._is_name(given, key) else given
        if isinstance(given, (list, tuple)) and any(isinstance(frame, str) for frame in given):
            frames = (self.value(frame, key, where.frame(number)) for number, frame in enumerate(given))
            return type(given)(frames)
        return given

    def _is_name(self, text: str, key: str) -> bool:
        head = text[:8].lower()
        if head.startswith(URL_HEADS):
            return True
        return self._reads_files and (head.startswith("file:") or (key == "path" and not is_data_url(text)))
