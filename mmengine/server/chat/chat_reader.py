"""Parses a /v1/chat/completions body into a request. Other chat APIs also use the reader for prompts and
tools.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import msgspec

from mmengine.errors import FIELD, ErrorCode, FieldPath, InvalidRequest, shown
from mmengine.models.box_unit import BoxUnit, unknown_unit
from mmengine.models.plugin import Processor
from mmengine.processing.fetch.fetcher import MediaFetcher
from mmengine.serve.chat.completion import with_tools
from mmengine.serve.prompt.prompt import Prompt
from mmengine.serve.prompt.tools import NO_LARKS, ToolCallSpec, ToolLimits, parse_tools
from mmengine.server.chat.answer_boxes import BoxPlanner, box_planner
from mmengine.server.chat.bodies import ChatBody
from mmengine.server.chat.field_tables import CHAT
from mmengine.server.chat.message_media import MediaContext, PixelLimits, read_message
from mmengine.server.chat.parsed_request import (
    AnswerFormat,
    Json,
    ParsedRequest,
    SamplingDefaults,
    build_request,
    check_logprobs,
    item_options,
    read_answer_format,
    read_sampling,
    without_nulls,
)
from mmengine.server.http.body_fields import Fields
from mmengine.server.http.errors import ApiError, api_error, decode_body
from mmengine.server.http.media_payloads import (
    NO_PAYLOADS,
    MediaPayloads,
    UploadReference,
    read_without_payloads,
)
from mmengine.server.settings import ServerSettings

FIELDS = Fields(CHAT)
_decode = msgspec.json.Decoder(ChatBody).decode


class ToolSupport(NamedTuple):
    """The processor and the settings for tool calls. `markers`: the texts that start and end reasoning."""

    processor: Processor
    limits: ToolLimits
    markers: tuple[str, str]


class ChatReader:
    """Parses chat bodies.

    `max_model_len`: maximum number of tokens in prompt and answer together. `media_fetcher`: fetches media
    from URLs and local files. Without a fetcher, both are refused. `box_unit`: returns the unit of the
    model's box coordinates, or raises InvalidRequest.
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
        box_unit: Callable[[], BoxUnit] = unknown_unit,
    ):
        self._box_unit = box_unit
        self._tools, self._max_schema_bytes = tools, max_schema_bytes
        self.max_messages = max_messages
        self._defaults, self.max_model_len, self._pixels = defaults, max_model_len, pixels
        self._media_fetcher, self._media_options = (
            media_fetcher,
            {"urls": media_fetcher} if media_fetcher is not None else {},
        )
        self._template: Json = {"chat_template": chat_template} if chat_template else {}
        self._ignore_unknown = ignore_unknown
        # Computes and caches the tool call format before the first request. If the template is invalid, each
        # request reports the error.
        with suppress(InvalidRequest):
            tools.processor.call_format(self._template or None)

    def read(self, data: bytes, request_id: str) -> ParsedRequest:
        """Parse a body. `request_id`: the default for the body's request_id. Raises ApiError."""
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
        larks: Mapping[str, str] = NO_LARKS,
    ) -> ParsedRequest:
        """Return the request for a decoded body. `request_id`: the default for the body's request_id.
        `larks`: see `parse_tools`. Raises ApiError.
        """
        answer_format = read_answer_format(body, self._max_schema_bytes)
        uploads: list[UploadReference] = []
        prompt, calls = self.read_prompt(body, payloads, uploads, larks)
        answer_format = answer_format._replace(calls=calls)
        sampling = read_sampling(body, self._defaults, self._budget(body), self._logprobs(body), FIELDS)
        parsed_request = build_request(
            api, body, [prompt], sampling, answer_format, request_id, ignored, FIELDS
        )
        shows, planner, plan = body.include_reasoning is not False, self._box_planner(answer_format), None
        if planner is not None:
            try:
                plan = planner.plan(prompt, planner.image(prompt))
            except InvalidRequest as error:
                raise api_error(error, FIELDS.names) from None
        return msgspec.structs.replace(
            parsed_request,
            envelope=msgspec.structs.replace(parsed_request.envelope, show_reasoning=shows, boxes=plan),
            logprobs=bool(body.logprobs),
            show_reasoning=shows,
            thinking_token_budget=_thinking(body),
            uploads=uploads,
            box_planner=planner if plan is None else None,
        )

    def _box_planner(self, answer_format: AnswerFormat) -> BoxPlanner | None:
        if not answer_format.has_boxes or answer_format.response_format is None:
            return None
        return box_planner(answer_format.response_format, self._tools.processor, self._box_unit)

    def read_prompt(
        self,
        body: ChatBody,
        payloads: MediaPayloads = NO_PAYLOADS,
        uploads: list[UploadReference] | None = None,
        larks: Mapping[str, str] = NO_LARKS,
    ) -> tuple[Prompt, ToolCallSpec | None]:
        """Return the prompt and, if the body has tools, the specification for the model's tool calls.

        Adds references to uploaded files to `uploads`. If `uploads` is None, such references are refused.
        `larks`: see `parse_tools`. Raises ApiError.
        """
        tools = self._tools
        if len(body.messages) > self.max_messages:
            text = (
                f"messages has {len(body.messages)} entries; the limit is {self.max_messages} (max_messages)"
            )
            raise ApiError(ErrorCode.INVALID_VALUE, text, FieldPath("messages"))
        try:
            selection = parse_tools(
                body.tools, body.tool_choice, body.parallel_tool_calls, tools.limits, larks
            )
            return with_tools(
                self._prompt(body, payloads, uploads), selection, tools.processor, tools.markers
            )
        except InvalidRequest as error:
            raise api_error(error, FIELDS.names) from None

    @property
    def media_options(self) -> Json:
        """The media options for a prompt: the fetcher for URLs and files, if the server has one."""
        return dict(self._media_options)

    def template_options(self, given: Json) -> Json:
        """Return the call's chat template variables and the server's template. Raises ApiError for an invalid
        variable.
        """
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
        return self.max_model_len

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
        media = MediaContext(self._pixels, self._media_fetcher, payloads, uploads)
        return Prompt(
            messages=[read_message(i, message, media) for i, message in enumerate(body.messages)],
            continue_final_message=bool(body.continue_final_message),
            add_generation_prompt=True if add is None else add,
            media_options={
                **item_options(body.mm_processor_kwargs, self._pixels.most),
                **self._media_options,
            },
            template_options=options or None,
        )


def _thinking(body: ChatBody) -> int | None:
    """Return the maximum number of reasoning tokens, or None for no limit. The reasoning effort "none" means
    0.
    """
    if body.thinking_token_budget is not None:
        return body.thinking_token_budget
    if body.thinking_budget is not None:
        return body.thinking_budget
    return 0 if body.reasoning_effort == "none" else None
