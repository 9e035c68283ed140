"""Converts the content parts of input items to the parts of chat messages, and to the parts that a response
object repeats. In the repeated parts, hashes replace the bytes of media.
"""

import hashlib
from collections.abc import Callable, Sequence

from mmengine.errors import FIELD, ErrorCode, FieldPath, shown
from mmengine.processing.media.data_urls import decode_data_url, is_data_url
from mmengine.server.chat.parsed_request import Json, without_nulls
from mmengine.server.http.errors import ApiError
from mmengine.server.http.media_payloads import FILE_ID, MediaPayloads

MAX_PARTS = 4096  # Maximum number of parts in an item.
REFERENCE = "sha256:"
# Maps each type of media part to the field that contains the URL.
_MEDIA = {"input_image": "image_url", "input_video": "video_url"}
_OPTIONS = ("detail", "min_pixels", "max_pixels")
_ASSISTANT_PARTS = {"output_text": "text", "refusal": "refusal"}


class Parts:
    """Converts content parts.

    `stored_media` returns a medium of an earlier response, given the medium's SHA-256 in hex.
    `reads_stored_media`: whether parts may refer to media of earlier responses. `media`: maps SHA-256 digests
    in hex to the media that were sent as data: URLs.
    """

    def __init__(self, payloads: MediaPayloads, stored_media: Callable[[str], bytes | None]):
        self._payloads, self._stored_media = payloads, stored_media
        self.reads_stored_media = False
        self.media: dict[str, bytes] = {}

    def read(self, where: FieldPath, given: object) -> tuple[str | list[Json], list[Json]]:
        """Return the chat message's content, and the parts that the response object repeats. Raises
        ApiError.
        """
        if isinstance(given, str):
            return given, [{"type": "input_text", "text": given}]
        read, repeated = [], []
        for number, part in enumerate(_list(where, given)):
            content, item = self._part(where / number, without_nulls(part))
            read.append(content)
            repeated.append(item)
        return read, repeated

    def _part(self, where: FieldPath, part: Json) -> tuple[Json, Json]:
        kind = part.get("type")
        if kind == "input_text":
            text = text_of(where, part, "text")
            return {"type": "text", "text": text}, {"type": kind, "text": text}
        if isinstance(kind, str) and kind in _MEDIA:
            return self._medium(where, kind, _MEDIA[kind], part)
        raise ApiError(
            ErrorCode.UNSUPPORTED_CONTENT,
            f"{FIELD} has the unsupported type {shown(kind)}; use input_text, {', '.join(_MEDIA)}",
            where / "type",
        )

    def _medium(self, where: FieldPath, kind: str, name: str, part: Json) -> tuple[Json, Json]:
        options = {each: part[each] for each in _OPTIONS if each in part}
        detail = options.get("detail", "auto")
        if detail not in ("auto", "low", "high", "original"):
            text = f"{FIELD} must be auto, low, high or original, not {shown(detail)}"
            raise ApiError(ErrorCode.INVALID_VALUE, text, where / "detail")
        source: str | bytes
        if "file_id" in part:
            given = "file_id"
            source = reference = _file_id(where, kind, part)
        else:
            given = name
            source, reference = self._source(where / name, text_of(where, part, name))
        read: Json = {"type": name, name: {"url": source, **options}}
        return read, {"type": kind, **options, "detail": detail, given: reference}

    def _source(self, where: FieldPath, url: str) -> tuple[str | bytes, str]:
        """Return a medium's bytes or URL for the chat message, and the URL or hash that replaces the medium
        in the response object.
        """
        if url.startswith(REFERENCE):
            data = self._stored_media(url.removeprefix(REFERENCE)) if self.reads_stored_media else None
            if data is None:
                text = f"{FIELD} refers to data that are not stored; send a data: URL"
                raise ApiError(ErrorCode.MEDIA_NOT_STORED, text, where)
            return data, url
        if is_data_url(url):
            data = self._payloads.of(url) or _data_of(where, url)
        elif "://" in url[:16] or url[:5].lower() == "file:":
            return url, url  # The chat reader checks whether the URL is allowed.
        else:
            raise ApiError(ErrorCode.INVALID_VALUE, f"{FIELD} must be a data: URL or an https: URL", where)
        name = hashlib.sha256(data).hexdigest()
        self.media[name] = data
        return data, REFERENCE + name

    def assistant_text(self, where: FieldPath, given: object) -> tuple[str, list[Json]]:
        """Return an assistant message's text, and the parts that the response object repeats. Raises
        ApiError.
        """
        if isinstance(given, str):
            given = [{"type": "output_text", "text": given}]
        texts, repeated = [], []
        for number, part in enumerate(_list(where, given)):
            place, kind = where / number, part.get("type")
            name = _ASSISTANT_PARTS.get(kind) if isinstance(kind, str) else None
            if name is None:
                text = f"{FIELD} has the unsupported type {shown(kind)}; use output_text or refusal"
                raise ApiError(ErrorCode.UNSUPPORTED_CONTENT, text, place / "type")
            texts.append(text_of(place, part, name))
            more: Json = {"annotations": [], "logprobs": []} if name == "text" else {}
            repeated.append({"type": kind, name: texts[-1], **more})
        return "".join(texts), repeated

    def reasoning(self, where: FieldPath, given: object, kind: str) -> list[dict[str, str]]:
        """Return the parts of a reasoning item. Raises ApiError if a part has a type other than `kind`."""
        if given is None:
            return []
        repeated = []
        for number, part in enumerate(_list(where, given)):
            place = where / number
            if part.get("type") != kind:
                text = f"{FIELD} must be {kind}, not {shown(part.get('type'))}"
                raise ApiError(ErrorCode.INVALID_VALUE, text, place / "type")
            repeated.append({"type": kind, "text": text_of(place, part, "text")})
        return repeated


def _list(where: FieldPath, given: object) -> Sequence[Json]:
    if not isinstance(given, list):
        raise ApiError(
            ErrorCode.INVALID_VALUE, f"{FIELD} must be a text or a list of parts, not {shown(given)}", where
        )
    if len(given) > MAX_PARTS:
        raise ApiError(
            ErrorCode.INVALID_VALUE, f"{FIELD} has {len(given)} parts; the limit is {MAX_PARTS}", where
        )
    for number, part in enumerate(given):
        if not isinstance(part, dict):
            text = f"{FIELD} must be an object with a type, not {shown(part)}"
            raise ApiError(ErrorCode.INVALID_VALUE, text, where / number)
    return given


def text_of(where: FieldPath, part: Json, name: str) -> str:
    """Return the field `name` of a part or an item. Raises ApiError if the field is not a string."""
    value = part.get(name)
    if not isinstance(value, str):
        raise ApiError(ErrorCode.INVALID_VALUE, f"{FIELD} must be a string, not {shown(value)}", where / name)
    return value


def _file_id(where: FieldPath, kind: str, part: Json) -> str:
    """Return the id of the uploaded image to which a part refers. Raises ApiError."""
    value = text_of(where, part, "file_id")
    if kind != "input_image" or "image_url" in part or not FILE_ID.fullmatch(value):
        text = f"{FIELD}={shown(value)} must name an uploaded image, and image_url must be absent"
        raise ApiError(ErrorCode.INVALID_VALUE, text, where / "file_id")
    return value


def _data_of(where: FieldPath, url: str) -> bytes:
    try:
        return decode_data_url(url)
    except ValueError as error:
        raise ApiError(ErrorCode.INVALID_MEDIA, f"{FIELD} {error}", where) from None
