"""Converts chat messages in three dialects to plain data for the chat template, and collects their media.

The dialects are OpenAI's parts (`image_url`, `text`), parts with options (`image` or `video` beside
`max_pixels`, `fps` and so on), and transformers' parts (`image` or `video` with `url`, `path` or `base64`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mmengine.errors import FIELD, HERE, FieldPath, InvalidRequest
from mmengine.processing.media.data_urls import is_data_url
from mmengine.processing.media.options import NAMES
from mmengine.processing.media.sources import MAX_IMAGE_BYTES, MAX_MEDIA, MediaPart, decode_base64
from mmengine.request import check_unicode

MAX_MESSAGES = 4096
MAX_PARTS = 4096
MAX_ALL_PARTS = 2**16  # Maximum number of parts in all messages together.
MAX_TEXT_CHARS = 2**23
MAX_DEPTH = 32
_VALUE_CHARS = 8  # A number, or an entry in a list or object, counts as this many characters.
_KEYS = {
    "image": ("image", "image_url", "url", "path", "base64"),
    "video": ("video", "video_url", "url", "path", "base64"),
}
_REASONING = ("reasoning_content", "thinking", "reasoning")  # Three names of the field with the reasoning.
_TYPES = {"image": "image", "image_url": "image", "video": "video", "video_url": "video", "text": "text"}


def read_messages(messages: Any) -> tuple[list[dict[str, Any]], list[MediaPart]]:
    """Return the messages for the template, and the media in prompt order. Raises InvalidRequest."""
    if not isinstance(messages, (list, Sequence)) or isinstance(messages, (str, bytes)) or not messages:
        raise InvalidRequest(
            f"{FIELD} must be a list of objects with role and content, not {_shown(messages)}; a prompt "
            'string becomes [{"role": "user", "content": "…"}]',
            path=FieldPath("messages"),
        )
    if len(messages) > MAX_MESSAGES:
        text = f"{FIELD} has {len(messages)} entries; the limit is {MAX_MESSAGES}: send fewer"
        raise InvalidRequest(text, path=FieldPath("messages"))
    reader = _Reader()
    try:
        return [reader.message(i, message) for i, message in enumerate(messages)], reader.media
    except InvalidRequest as error:
        raise error.located(reader.path) from None


def fill(parts: list[MediaPart], beside: list[MediaPart]) -> list[MediaPart]:
    """Return the parts. Parts without data get the images and videos in `beside`, in order."""
    given: dict[str, Iterator[Any]] = {}
    for modality in ("image", "video"):
        items = [part.source for part in beside if part.modality == modality]
        given[modality] = iter(items)
        empty = sum(part.modality == modality and part.source is None for part in parts)
        if empty != len(items):
            raise InvalidRequest(
                f"the messages have {empty} {modality} placeholders without data, but {len(items)} "
                f"{modality}s were passed; give one for each"
            )
    return [
        part if part.source is not None else replace(part, source=next(given[part.modality]))
        for part in parts
    ]


def read_variables(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the chat template's variables. Raises InvalidRequest unless the variables are JSON
    data.
    """
    reader = _Reader()
    for name in ("messages", "add_generation_prompt"):
        if name in given:
            text = f"{name} cannot be given as a variable of the chat template; leave it out"
            raise InvalidRequest(text, path=FieldPath("template_options", name))
    found = {}
    for name, value in given.items():
        try:
            found[name] = reader.plain(value, FIELD, 0)
        except InvalidRequest as error:
            raise error.located(("template_options", str(name)[:60])) from None
    return found


class _Reader:
    """Reads the messages in a single pass, and enforces the limits on media, parts and characters.

    `path`: the message or part that is being read. The methods' argument `where` names a value in error
    messages.
    """

    def __init__(self) -> None:
        self.path = HERE
        self.media: list[MediaPart] = []
        self._counts = {"image": 0, "video": 0}
        self._chars = self._parts = 0

    def message(self, index: int, message: Any) -> dict[str, Any]:
        where, self.path = FIELD, FieldPath("messages", index)
        # Test for dict first, because an isinstance test with an abstract class is slow.
        if not isinstance(message, (dict, Mapping)):
            raise InvalidRequest(f"{where} must be an object with role and content, not {_shown(message)}")
        if not isinstance(message.get("role"), str):
            raise InvalidRequest(f"{where} has no role; it must be a string such as user")
        fields = {}
        for name, value in message.items():
            if value is None:  # Templates treat a field as set even if it is None.
                continue
            if name == "content":
                fields["content"] = self._content(value, where)
            else:
                fields[self._text(name, where)] = self.plain(value, f"{where}, {str(name)[:60]}", 0)
        reasoning = next((fields[name] for name in _REASONING if name in fields), None)
        if reasoning is not None:
            fields = {"thinking": reasoning, **fields, "reasoning_content": reasoning}
        if "content" not in fields and "tool_calls" not in fields:
            raise InvalidRequest(f"{where} has no content")
        return fields

    def _content(self, content: Any, where: str) -> str | list[dict[str, Any]]:
        if isinstance(content, str):
            return self._text(content, where)
        if not isinstance(content, (list, Sequence)) or isinstance(content, (bytes, bytearray)):
            raise InvalidRequest(
                f"the content of {where} must be text or a list of parts, not {_shown(content)}"
            )
        path = self.path
        if len(content) > MAX_PARTS:
            raise InvalidRequest(f"{where} has {len(content)} parts; the limit is {MAX_PARTS}: send fewer")
        self._parts += len(content)
        if self._parts > MAX_ALL_PARTS:
            text = f"{FIELD} have more than {MAX_ALL_PARTS} parts together: join texts"
            raise InvalidRequest(text, path=FieldPath("messages"))
        parts = []
        for i, part in enumerate(content):
            self.path = path / "content" / i
            parts.append(self._part(part, FIELD))
        self.path = path
        return parts

    def _part(self, part: Any, where: str) -> dict[str, Any]:
        if not isinstance(part, (dict, Mapping)):
            raise InvalidRequest(f"{where} must be an object with a type, not {_shown(part)}")
        modality = _modality(part)
        if modality == "text":
            text = part.get("text")
            if not isinstance(text, str):
                raise InvalidRequest(f"{where} is a text part, but its text is {_shown(text)}")
            return {"type": "text", "text": self._text(text, where)}
        if modality is None:
            raise InvalidRequest(
                f"{where} has the type {_shown(part.get('type'))}; text, image and video are supported"
            )
        number = self._counts[modality]
        self._counts[modality] += 1
        if len(self.media) >= MAX_MEDIA:
            raise InvalidRequest(f"{where}: the limit is {MAX_MEDIA} images and videos in one request")
        where = f"{modality} {number} ({where})"
        options = {name: part[name] for name in NAMES if part.get(name) is not None}
        self.media.append(MediaPart(modality, _source(part, modality, where), options, where, self.path))
        return {"type": modality}

    def _text(self, text: Any, where: str) -> str:
        if not isinstance(text, str):
            raise InvalidRequest(f"{where} has a key that is not a string")
        self._count(len(text))
        check_unicode(self.path, text)
        return str(text)

    def _count(self, chars: int) -> None:
        self._chars += chars
        if self._chars > MAX_TEXT_CHARS:
            text = f"{FIELD} hold more than {MAX_TEXT_CHARS} characters of text together: shorten them"
            raise InvalidRequest(text, path=FieldPath("messages"))

    def plain(self, value: Any, where: str, depth: int) -> Any:
        """Return a copy of a JSON value, such as a message's tool_calls or a template variable. Raises
        InvalidRequest unless the value is JSON data.
        """
        if depth > MAX_DEPTH:
            raise InvalidRequest(f"{where} is nested more than {MAX_DEPTH} deep")
        if isinstance(value, str):
            return self._text(value, where)
        if value is None or isinstance(value, (bool, int, float)):
            self._count(_VALUE_CHARS)
            return value
        if isinstance(value, Mapping):
            self._count(_VALUE_CHARS * len(value))
            return {self._text(key, where): self.plain(item, where, depth + 1) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            self._count(_VALUE_CHARS * len(value))
            return [self.plain(item, where, depth + 1) for item in value]
        raise InvalidRequest(f"{where} must be JSON data, not {_shown(value)}")


def _modality(part: Mapping[str, Any]) -> str | None:
    kind = part.get("type")
    if kind is not None:
        return _TYPES.get(kind) if isinstance(kind, str) else None
    return next((modality for key, modality in _TYPES.items() if key in part), None)


def _source(part: Mapping[str, Any], modality: str, where: str) -> Any:
    for key in _KEYS[modality]:
        value = part.get(key)
        if isinstance(value, Mapping) and key in ("image_url", "video_url"):
            value = value.get("url")
            if value is None:
                raise InvalidRequest(f"{where}: its {key} has no url")
        if value is None:
            continue
        if key == "base64" and isinstance(value, str) and not is_data_url(value):
            return decode_base64(value, MAX_IMAGE_BYTES, where)
        return value
    return None


def _shown(value: Any) -> str:
    """Return a short description of a value for an error message."""
    if value is None or isinstance(value, (str, int, float, bool)):
        text = repr(value)
        return text if len(text) <= 60 else text[:60] + "…"
    return f"a {type(value).__name__}"
