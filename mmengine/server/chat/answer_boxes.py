"""Converts the boxes in an answer to pixels in the client's image, if the response format sets `boxes`."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple, NoReturn

import msgspec

from mmengine.errors import FIELD, ErrorCode, FieldPath, InvalidMedia, InvalidRequest
from mmengine.models.box_unit import Box, BoxUnit
from mmengine.models.plugin import Processor
from mmengine.processing.chat.messages import read_messages
from mmengine.processing.media.boxes import MARK, ImageFrame
from mmengine.processing.media.data_urls import is_data_url
from mmengine.processing.media.sources import (
    MAX_IMAGE_BYTES,
    Access,
    MediaPart,
    is_base64_image,
    read_source,
)
from mmengine.serve.engine.boxes import boxes_in, image_frame
from mmengine.serve.prompt.prompt import Prompt
from mmengine.server.http.errors import ApiError, Json

WHERE = FieldPath("response_format", "boxes")
_ANY = "true"  # The JSON schema that accepts every value.


class BoxPlan(msgspec.Struct, frozen=True, array_like=True):
    """The data for converting an answer's boxes. The log stores a BoxPlan in the request's envelope.

    `unit` and `patch`: the arguments for BoxUnit. `frame`: the arguments for ImageFrame. `schema`: the
    answer's JSON schema as text, or "true" if the schema marks no boxes.
    """

    unit: Literal["thousandths", "pixels"]
    patch: int
    frame: tuple[int, int, int, int, int]
    schema: str

    def boxes(self, content: str) -> dict[str, Box]:
        """Return the boxes in an answer's text by JSON pointer, or {} if the answer is not valid JSON."""
        try:
            value = json.loads(content)
        except (ValueError, RecursionError):
            return {}
        return boxes_in(value, self.schema, BoxUnit(self.unit, self.patch), ImageFrame(*self.frame))


class BoxPlanner(NamedTuple):
    """Makes a call's BoxPlan from the prompt's image."""

    response_format: Json
    unit: BoxUnit
    processor: Processor

    def image(self, prompt: Prompt) -> MediaPart:
        """Return the prompt's only image. Raises ApiError if there is not exactly one image, and
        InvalidRequest for invalid messages.
        """
        _, parts = read_messages(prompt.messages)
        if len(parts) != 1 or parts[0].modality != "image":
            raise _refused(f"needs exactly one image in the prompt, which has {_counted(parts)}")
        (part,) = parts
        return replace(part, source=part.source.get("url")) if isinstance(part.source, Mapping) else part

    def plan(self, prompt: Prompt, image: MediaPart) -> BoxPlan | None:
        """Return the plan for the prompt's image, or None if the image is still a URL, a path or a file id.
        May decode the image, so call it on a parser thread. Raises ApiError.
        """
        source = image.source
        if isinstance(source, str) and not (is_data_url(source) or is_base64_image(source)):
            return None
        try:
            data = read_source(source, Access(local_files=False), MAX_IMAGE_BYTES, image.where)
            part = {"type": "image", "image": data, **image.options}
            frame = image_frame(data, self.unit, self.processor, part, prompt.processor_options)
        except (InvalidMedia, InvalidRequest, ValueError) as error:
            raise _refused(f"needs a readable image: {error}") from None
        width, height, orientation, resized_width, resized_height = frame
        sizes = width, height, orientation, resized_width, resized_height
        return BoxPlan(self.unit.kind, self.unit.patch, sizes, _schema(self.response_format))


def box_planner(response_format: Json, processor: Processor, box_unit: Callable[[], BoxUnit]) -> BoxPlanner:
    """Return the planner for a call. Raises ApiError if the answer cannot have boxes."""
    if response_format.get("type") not in ("json_schema", "json_object"):
        raise _refused("needs an answer that is one JSON value: use the type json_schema or json_object")
    try:
        return BoxPlanner(response_format, box_unit(), processor)
    except InvalidRequest as error:
        raise _refused(f"cannot be set: {error.text}", ErrorCode.UNSUPPORTED_FIELD) from None


def refuse_session() -> NoReturn:
    """Raise ApiError for a session's turn that requests boxes. Boxes need exactly one image, but earlier
    turns may contain images.
    """
    raise _refused("is not supported in a session; use /v1/chat/completions", ErrorCode.UNSUPPORTED_FIELD)


def refuse_unread() -> NoReturn:
    """Raise ApiError for boxes in an image whose bytes the server does not have."""
    raise _refused("needs the image's file: send a data: URL, an https: URL or an uploaded file")


def refuse_text() -> NoReturn:
    """Raise ApiError for boxes in a prompt without messages."""
    raise _refused("needs an image in the prompt, which is a text; use /v1/chat/completions")


def _counted(parts: Sequence[MediaPart]) -> str:
    images = sum(part.modality == "image" for part in parts)
    return f"{images} images and {len(parts) - images} videos" if len(parts) > images else str(images)


def _schema(response_format: Json) -> str:
    given = response_format.get("json_schema")
    schema = given.get("schema") if isinstance(given, dict) else None
    text = schema.decode() if isinstance(schema, bytes) else json.dumps(schema)
    return text if schema is not None and f'"{MARK}"' in text else _ANY


def _refused(text: str, code: ErrorCode = ErrorCode.INVALID_VALUE) -> ApiError:
    return ApiError(code, f"{FIELD} {text}", WHERE)
