"""Reads the body of /v1/chat/completions into a request."""

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import msgspec

from mmengine.errors import FIELD, ErrorCode, FieldPath, InvalidRequest, shown
from mmengine.models.plugin import Processor
from mmengine.processing.fetch.fetcher import MediaFetcher
from mmengine.serve.chat.completion import with_tools
from mmengine.serve.prompt.prompt import Prompt
from mmengine.serve.prompt.tools import ToolCallSpec, ToolLimits, parse_tools
from mmengine.server.chat.bodies import ChatBody
from mmengine.server.chat.field_tables import CHAT
from mmengine.server.chat.media_fetch import check_url
from mmengine.server.chat.parsed_request import (
    Json,
    ParsedRequest,
    SamplingDefaults,
    build_request,
    check_logprobs,
    clamp_pixels,
    item_options,
    read_answer_format,
    read_sampling,
    without_nulls,
)
from mmengine.server.http.body_fields import Fields
from mmengine.server.http.errors import ApiError, api_error, decode_body
from mmengine.server.http.media_payloads import (
    FILE_ID,
    NO_PAYLOADS,
    MediaPayloads,
    UploadReference,
    read_without_payloads,
)
from mmengine.server.settings import ServerSettings

LOW_DETAIL_PIXELS = 512 * 512  # Most pixels for OpenAI's detail "low".
LOW_SHARE = 4  # Detail "low" also has at most this part of the model's default pixels.
_TAKEN_PARTS = ("text", "image_url", "image", "video_url", "video", "file")
_MEDIA = (("image_url", "image"), ("video_url", "video"))
FIELDS = Fields(CHAT)
_decode = msgspec.json.Decoder(ChatBody).decode


class PixelLimits(NamedTuple):
    """Pixel limits for an image: the most that a call may set, and the value for detail "low"."""

    most: int
    low: int

    @classmethod
    def of(cls, most: int, default: int) -> "PixelLimits":
        """Return the limits. `default`: the model's default pixel count."""
        return cls(most, min(LOW_DETAIL_PIXELS, default // LOW_SHARE))


class ToolSupport(NamedTuple):
    """The server parts that tool calls need. `markers`: the texts that start and end reasoning."""

    processor: Processor
    limits: ToolLimits
    markers: tuple[str, str]


class ChatReader:
    """Reads chat bodies. `max_model_len`: limit for the tokens in prompt and answer. `media_fetcher`: fetches
    media that messages name; None: no URLs and files are read.
    """

    def __init__(
        self,
        defaults: SamplingDefaults,
        max_model_len: int,
        chat_template: str,
        pixels: PixelLimits,
        tools: ToolSupport,
        ignore_unknown: bool,
        media_fetcher: MediaFetcher | None = None,
        max_messages: int = ServerSettings().max_messages,
        max_schema_bytes: int = ServerSettings().max_schema_bytes,
    ):
        self._tools, self._max_schema_bytes = tools, max_schema_bytes
        self.max_messages, self.max_tools = max_messages, tools.limits.max_tools
        self._defaults, self._max_model_len, self._pixels = defaults, max_model_len, pixels
        self._media_fetcher, self._media_options = (
            media_fetcher,
            {"urls": media_fetcher} if media_fetcher is not None else {},
        )
        self._template: Json = {"chat_template": chat_template} if chat_template else {}
        self._ignore_unknown = ignore_unknown
        with suppress(InvalidRequest):  # Each call reports an invalid template.
            # Found at startup, so that the first call does not wait.
            tools.processor.call_format(self._template or None)

    def read(self, data: bytes, request_id: str) -> ParsedRequest:
        """Read a body, however large. `request_id`: the request's id, unless the body has a request_id.
        Raises ApiError.
        """
        return read_without_payloads(data, partial(self._read, request_id=request_id))

    def _read(self, data: bytes, payloads: MediaPayloads, request_id: str) -> ParsedRequest:
        ignored = FIELDS.check(data, ignore_unknown=self._ignore_unknown)
        return self.parse("chat", decode_body(data, _decode), request_id, ignored, payloads)

    def parse(
        self,
        api: str,
        body: ChatBody,
        request_id: str,
        ignored: list[str],
        payloads: MediaPayloads = NO_PAYLOADS,
    ) -> ParsedRequest:
        """Return the request for a decoded body. `request_id`: the request's id, unless the body has a
        request_id. Raises ApiError.
        """
        answer_format = read_answer_format(body, self._max_schema_bytes)
        uploads: list[UploadReference] = []
        prompt, calls = self.read_prompt(body, payloads, uploads)
        answer_format = answer_format._replace(calls=calls)
        sampling = read_sampling(body, self._defaults, self._budget(body), self._logprobs(body), FIELDS)
        parsed_request = build_request(
            api, body, [prompt], sampling, answer_format, request_id, ignored, FIELDS
        )
        shows = body.include_reasoning is not False
        return msgspec.structs.replace(
            parsed_request,
            envelope=msgspec.structs.replace(parsed_request.envelope, show_reasoning=shows),
            logprobs=bool(body.logprobs),
            show_reasoning=shows,
            thinking_token_budget=_thinking(body),
            uploads=uploads,
        )

    def read_prompt(
        self,
        body: ChatBody,
        payloads: MediaPayloads = NO_PAYLOADS,
        uploads: list[UploadReference] | None = None,
    ) -> tuple[Prompt, ToolCallSpec | None]:
        """Return the prompt, and the tool calls that the answer may make.

        `uploads`: receives references to uploaded files; None refuses them. Raises ApiError.
        """
        tools = self._tools
        if len(body.messages) > self.max_messages:
            text = (
                f"messages has {len(body.messages)} entries; the limit is {self.max_messages} (max_messages)"
            )
            raise ApiError(ErrorCode.INVALID_VALUE, text, FieldPath("messages"))
        try:
            selection = parse_tools(body.tools, body.tool_choice, body.parallel_tool_calls, tools.limits)
            return with_tools(
                self._prompt(body, payloads, uploads), selection, tools.processor, tools.markers
            )
        except InvalidRequest as error:
            raise api_error(error, FIELDS.names) from None

    @property
    def media_options(self) -> Json:
        """The media options that allow URLs and files."""
        return dict(self._media_options)

    def template_options(self, given: Json) -> Json:
        """Return the chat template's variables, with the server's own template. Raises ApiError."""
        variables = without_nulls(given)
        for name in ("chat_template", "messages", "tools", "add_generation_prompt"):
            if name in variables:
                place = FieldPath("chat_template_kwargs", name)
                raise ApiError(ErrorCode.UNSUPPORTED_FIELD, f"{FIELD} is not supported; leave it out", place)
        return {**variables, **self._template}

    def _budget(self, body: ChatBody) -> int:
        for name in ("max_completion_tokens", "max_tokens"):
            value = getattr(body, name)
            if value is not None:
                if not 1 <= value <= 10**7:
                    raise ApiError(
                        ErrorCode.INVALID_VALUE,
                        f"{FIELD} must be 1 to 10000000, not {shown(value)}",
                        name,
                    )
                return int(value)
        return self._max_model_len

    def _logprobs(self, body: ChatBody) -> int | None:
        check_logprobs("top_logprobs", body.top_logprobs)
        if body.top_logprobs and not body.logprobs:
            raise ApiError(
                ErrorCode.INVALID_VALUE, f"{FIELD} requires logprobs=true", FieldPath("top_logprobs")
            )
        return (body.top_logprobs or 0) if body.logprobs else None

    def _prompt(
        self, body: ChatBody, payloads: MediaPayloads, uploads: list[UploadReference] | None
    ) -> Prompt:
        if body.continue_final_message and body.add_generation_prompt:
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                f"continue_final_message and {FIELD} exclude each other",
                FieldPath("add_generation_prompt"),
            )
        options = self.template_options(body.chat_template_kwargs or {})
        add = body.add_generation_prompt
        media = _Media(self._pixels, self._media_fetcher, payloads, uploads)
        return Prompt(
            messages=[_message(i, message, media) for i, message in enumerate(body.messages)],
            continue_final_message=bool(body.continue_final_message),
            add_generation_prompt=True if add is None else add,
            media_options={
                **item_options(body.mm_processor_kwargs, self._pixels.most),
                **self._media_options,
            },
            template_options=options or None,
        )


def _thinking(body: ChatBody) -> int | None:
    """Return the thinking budget in tokens, or None if the model decides. An effort other than none has no
    fixed budget.
    """
    if body.thinking_token_budget is not None:
        return body.thinking_token_budget
    if body.thinking_budget is not None:
        return body.thinking_budget
    return 0 if body.reasoning_effort == "none" else None


class _Media(NamedTuple):
    """The parameters for reading media in messages."""

    pixels: PixelLimits
    media_fetcher: MediaFetcher | None
    payloads: MediaPayloads
    uploads: list[UploadReference] | None


def _message(index: int, message: Json, media: _Media) -> Json:
    """Return a message in the processor's format. The processor checks everything else."""
    read = without_nulls(message)
    if read.get("role") == "developer":  # OpenAI's newer name, which chat templates do not know.
        read["role"] = "system"
    content = read.get("content")
    if isinstance(content, list):
        where = FieldPath("messages", index, "content")
        read["content"] = [_part(where / n, part, media) for n, part in enumerate(content)]
    return read


def _part(where: FieldPath, part: object, media: _Media) -> object:
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


def _medium(where: FieldPath, part: Json, names: tuple[str, str], media: _Media) -> Json:
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
    return clamp_pixels(where, {**options, **part}, pixels.most)


def _image_of_file(where: FieldPath, part: Mapping[str, object]) -> Json:
    """Return OpenAI's file part as an image part. Raises ApiError."""
    file = part.get("file")
    found = without_nulls(file) if isinstance(file, Mapping) else {}
    file_id = found.get("file_id")
    if set(found) != {"file_id"} or not isinstance(file_id, str) or not FILE_ID.fullmatch(file_id):
        text = f"{FIELD} must have the file_id of an uploaded image, and no other field"
        raise ApiError(ErrorCode.UNSUPPORTED_CONTENT, text, where / "file")
    return {"type": "image_url", "image_url": {"url": file_id}}


def _uploaded(where: FieldPath, file_id: str, uploads: list[UploadReference] | None) -> Json:
    """Return the part that will hold an uploaded file's bytes, and note the reference. Raises ApiError."""
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
