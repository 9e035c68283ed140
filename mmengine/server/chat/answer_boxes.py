"""Converts the boxes in answers to pixels of the image that the client sent, if the response format has
`boxes`.
"""

import json
from collections.abc import Callable, Iterator
from typing import Literal, NoReturn

import msgspec

from mmengine.errors import FIELD, ErrorCode, FieldPath, InvalidMedia, InvalidRequest
from mmengine.models.box_unit import Box, BoxUnit, unit_of
from mmengine.models.plugin import Processor
from mmengine.processing.media.boxes import MARK, ImageFrame
from mmengine.processing.media.data_urls import decode_data_url, is_data_url
from mmengine.serve.engine.boxes import boxes_in, image_frame
from mmengine.serve.prompt.prompt import MEDIA_KEYS, Prompt
from mmengine.server.http.errors import ApiError, Json

WHERE = FieldPath("response_format", "boxes")
_ANY = "true"  # a schema without marks


class BoxPlan(msgspec.Struct, frozen=True, array_like=True):
    """The data for converting the boxes in an answer. The log stores these data in the request's envelope.

    `unit`, `patch`: a BoxUnit. `frame`: an ImageFrame. `schema`: the answer's schema as JSON text, if the
    schema marks boxes.
    """

    unit: Literal["thousandths", "pixels"]
    patch: int
    frame: tuple[int, int, int, int, int]
    schema: str

    def boxes(self, content: str) -> dict[str, Box]:
        """Return the boxes in an answer's text by JSON pointer. An incomplete answer has none."""
        try:
            value = json.loads(content)
        except (ValueError, RecursionError):
            return {}
        return boxes_in(value, self.schema, BoxUnit(self.unit, self.patch), ImageFrame(*self.frame))


def unknown_unit() -> BoxUnit:
    """Raise InvalidRequest, for a server that does not know its model's unit."""
    return unit_of("unknown", {})


def plan_boxes(
    response_format: Json, prompt: Prompt, processor: Processor, box_unit: Callable[[], BoxUnit]
) -> BoxPlan:
    """Return the plan for a call. May decode the image, so it runs on a parser thread. Raises ApiError."""
    if response_format.get("type") not in ("json_schema", "json_object"):
        raise _refused("needs an answer that is one JSON value: use the type json_schema or json_object")
    try:
        unit = box_unit()
    except InvalidRequest as error:
        raise _refused(f"cannot be set: {error.text}", ErrorCode.UNSUPPORTED_FIELD) from None
    parts = list(_media_parts(prompt))
    if len(parts) != 1:
        raise _refused(f"needs exactly one image in the prompt, which has {len(parts)} images and videos")
    try:
        frame = image_frame(_data(parts[0]), unit, processor, parts[0], prompt.processor_options)
    except (InvalidMedia, InvalidRequest, ValueError) as error:
        raise _refused(f"needs a readable image: {error}") from None
    width, height, orientation, resized_width, resized_height = frame
    sizes = width, height, orientation, resized_width, resized_height
    return BoxPlan(unit.kind, unit.patch, sizes, _schema(response_format))


def refuse_text() -> NoReturn:
    """Raise ApiError, for a call whose prompt is a text."""
    raise _refused("needs an image in the prompt, which is a text; use /v1/chat/completions")


def _media_parts(prompt: Prompt) -> Iterator[Json]:
    for message in prompt.messages or ():
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and (MEDIA_KEYS & part.keys()):
                yield part


def _data(part: Json) -> bytes:
    """Return the bytes of an image part. Raises ApiError for a video, a URL and an uploaded file."""
    for name in ("image_url", "image"):
        given = part.get(name)
        data = given.get("url") if isinstance(given, dict) else given
        if isinstance(data, bytes):
            return data
        if isinstance(data, str) and is_data_url(data):
            return decode_data_url(data)
    raise _refused("needs the image as a data: URL, because boxes are given in the pixels of its file")


def _schema(response_format: Json) -> str:
    given = response_format.get("json_schema")
    schema = given.get("schema") if isinstance(given, dict) else None
    text = schema.decode() if isinstance(schema, bytes) else json.dumps(schema)
    return text if schema is not None and f'"{MARK}"' in text else _ANY


def _refused(text: str, code: ErrorCode = ErrorCode.INVALID_VALUE) -> ApiError:
    return ApiError(code, f"{FIELD} {text}", WHERE)
