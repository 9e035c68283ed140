"""Reads the media parts of chat messages. Checks their URLs, file ids and pixel limits."""

from collections.abc import Mapping
from typing import NamedTuple

from mmengine.errors import FIELD, ErrorCode, FieldPath, shown
from mmengine.processing.fetch.fetcher import MediaFetcher
from mmengine.server.chat.media_fetch import check_url
from mmengine.server.chat.parsed_request import (
    Json,
    clamp_pixels,
    without_nulls,
)
from mmengine.server.http.errors import ApiError
from mmengine.server.http.media_payloads import (
    FILE_ID,
    MediaPayloads,
    UploadReference,
)

LOW_DETAIL_PIXELS = 512 * 512  # Maximum number of pixels for OpenAI's detail "low".
LOW_SHARE = 4  # Detail "low" also allows at most 1 / LOW_SHARE of the model's default number of pixels.
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TAKEN_PARTS = ("text", "image_url", "image", "video_url", "video", "file")
_MEDIA = (("image_url", "image"), ("video_url", "video"))


class PixelLimits(NamedTuple):
    """Pixel limits for an image. `most`: the largest limit that a call may set. `low`: the limit for detail
    "low".
    """

    most: int
    low: int

    @classmethod
    def of(cls, most: int, default: int) -> "PixelLimits":
        """Return the limits. `default`: the model's default number of pixels."""
        return cls(most, min(LOW_DETAIL_PIXELS, default // LOW_SHARE))


class MediaContext(NamedTuple):
    """The server's settings and the call's media, for the functions that read media parts."""

    pixels: PixelLimits
    media_fetcher: MediaFetcher | None
    payloads: MediaPayloads
    uploads: list[UploadReference] | None


def read_message(index: int, message: Json, media: MediaContext) -> Json:
    """Return a message in the multimodal processor's format. Checks only the role and the media; the
    processor checks all other fields. Raises ApiError.
    """
    read = without_nulls(message)
    role = read.get("role")
    if isinstance(role, str) and role not in _ROLES:
        text = f"{FIELD} must be one of {', '.join(_ROLES)}, not {shown(role)}"
        raise ApiError(ErrorCode.INVALID_VALUE, text, FieldPath("messages", index, "role"))
    if role == "developer":  # OpenAI's newer name for the system role. Chat templates know only "system".
        read["role"] = "system"
    if role == "assistant" and "content" not in read:
        _add_content(read)
    content = read.get("content")
    if isinstance(content, list):
        where = FieldPath("messages", index, "content")
        read["content"] = [
            _part(where / n, _as_text(part) if role == "assistant" else part, media)
            for n, part in enumerate(content)
        ]
    return read


def _add_content(message: Json) -> None:
    """Set an assistant message's missing content to the message's refusal, or to "" if the message has
    reasoning and no refusal.
    """
    refusal = message.get("refusal")
    if isinstance(refusal, str):
        message["content"] = refusal
    elif any(isinstance(message.get(name), str) for name in ("reasoning_content", "reasoning")):
        message["content"] = ""


def _as_text(part: object) -> object:
    """Convert a refusal, which OpenAI's models may return as a part, to a text part."""
    if isinstance(part, Mapping) and part.get("type") == "refusal":
        return {"type": "text", "text": part.get("refusal")}
    return part


def _part(where: FieldPath, part: object, media: MediaContext) -> object:
    if not isinstance(part, dict):
        return part
    kind = part.get("type")
    if kind is not None and kind not in _TAKEN_PARTS:
        raise ApiError(
            ErrorCode.UNSUPPORTED_CONTENT,
            f"{FIELD} has the unsupported type {shown(kind)}; use {', '.join(_TAKEN_PARTS)}",
            where,
        )
    if kind == "file":
        return _medium(where, _image_of_file(where, part), ("image_url", "image"), media)
    for names in _MEDIA:
        if kind in names or (kind is None and any(name in part for name in names)):
            return _medium(where, without_nulls(part), names, media)
    return part


def _medium(where: FieldPath, part: Json, names: tuple[str, str], media: MediaContext) -> Json:
    options: Json = {}
    pixels, media_fetcher, payloads, uploads = media
    for name in (*names, "url"):
        given = part.get(name)
        in_mapping = isinstance(given, Mapping)
        if isinstance(given, Mapping):
            options = _detail(where, name, without_nulls(given), pixels)
            given = options.pop("url", None)
        if isinstance(given, str):
            check_url(where / name, given, media_fetcher)
            if FILE_ID.fullmatch(given):
                part = {**part, name: _uploaded(where / name, given, uploads)}
                continue
            given = payloads.of(given) or given
        if given is not None or in_mapping:
            part = {**part, name: {"url": given} if in_mapping else given}
    if "path" in part and not (media_fetcher is not None and media_fetcher.reads_files):
        raise ApiError(
            ErrorCode.INVALID_VALUE, f"{FIELD} is not supported; send the file as a data: URL", where / "path"
        )
    if not any(name in part for name in (*names, "url", "path", "base64")):
        text = f"{FIELD} has no {names[1]}; send {names[0]} with a data: URL"
        raise ApiError(ErrorCode.INVALID_VALUE, text, where)
    return clamp_pixels(where, {**options, **part}, pixels.most)


def _image_of_file(where: FieldPath, part: Mapping[str, object]) -> Json:
    """Convert OpenAI's `file` part to an image part. Raises ApiError."""
    file = part.get("file")
    found = without_nulls(file) if isinstance(file, Mapping) else {}
    file_id = found.get("file_id")
    if set(found) != {"file_id"} or not isinstance(file_id, str) or not FILE_ID.fullmatch(file_id):
        text = f"{FIELD} must have the file_id of an uploaded image, and no other field"
        raise ApiError(ErrorCode.UNSUPPORTED_CONTENT, text, where / "file")
    return {"type": "image_url", "image_url": {"url": file_id}}


def _uploaded(where: FieldPath, file_id: str, uploads: list[UploadReference] | None) -> Json:
    """Return an object whose `url` is the file id, and add a reference to this object to `uploads`. The
    file's bytes replace the id later. Raises ApiError.
    """
    if uploads is None:
        raise ApiError(
            ErrorCode.INVALID_VALUE,
            f"{FIELD} names an uploaded file, which this route does not support",
            where,
        )
    held: Json = {"url": file_id}
    uploads.append(UploadReference(held, file_id, where))
    return held


def _detail(where: FieldPath, name: str, given: Json, pixels: PixelLimits) -> Json:
    detail = given.pop("detail", "auto")
    if detail not in ("auto", "low", "high", "original"):
        place = where / name / "detail"
        raise ApiError(
            ErrorCode.INVALID_VALUE, f"{FIELD} must be auto, low or high, not {shown(detail)}", place
        )
    for key in given:
        if key not in ("url", "min_pixels", "max_pixels"):
            place = where / name / key[:64]
            raise ApiError(ErrorCode.UNKNOWN_FIELD, f"{FIELD} is unknown; leave it out", place)
    return {**({"max_pixels": pixels.low} if detail == "low" else {}), **given}
