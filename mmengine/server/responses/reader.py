"""Parses a /v1/responses body into a request, by converting the body to a chat body."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import msgspec

from mmengine.errors import FIELD, ErrorCode, FieldPath, shown
from mmengine.server.chat.bodies import ChatBody, StreamOptions
from mmengine.server.chat.chat_reader import ChatReader
from mmengine.server.chat.parsed_request import Json, ParsedRequest
from mmengine.server.chat.response_echo import ANY_TOOL, NO_REASONING, NOTHING, ResponseEcho, echo_json
from mmengine.server.http.errors import ApiError, decode_body
from mmengine.server.http.field_names import INDEX, FieldNames, Renames
from mmengine.server.http.media_payloads import MediaPayloads, cut_short, read_without_payloads
from mmengine.server.http.unsupported import Unsupported
from mmengine.server.responses.body import AS_CHAT, LOGPROBS, ResponsesBody, decode
from mmengine.server.responses.chat_fields import (
    allowed_places,
    chat_choice,
    chat_form,
    chat_tools,
    echo_text,
    echo_tools,
)
from mmengine.server.responses.conversation import Conversation
from mmengine.server.responses.custom_tools import enforced_larks
from mmengine.server.responses.field_table import FIELDS

NO_LOG = "requires stored responses, which need a log: start the server with --log"
IN_BATCH = "is not supported in a batch, which stores responses only in its output file; leave it out"
_INCLUDED = (LOGPROBS, "reasoning.encrypted_content")


class _Previous(msgspec.Struct, frozen=True):
    previous_response_id: str | None = None


_decode_previous = msgspec.json.Decoder(_Previous).decode


def previous_of(data: bytes) -> str | None:
    """Return the id of the response that a body continues, or None. Raises ApiError if the body is not a JSON
    object.
    """
    return decode_body(cut_short(data), _decode_previous).previous_response_id


def _no_media(name: str) -> bytes | None:
    return None


class ResponsesReader:
    """Parses /v1/responses bodies.

    `chat`: parses the converted chat body. `is_lenient`: ignore unsupported parts of a body.
    `stores_responses`: whether the server stores responses. `refusal`: the error message for fields that
    require stored responses.
    """

    def __init__(
        self,
        chat: ChatReader,
        *,
        is_lenient: bool = False,
        ignore_unknown: bool,
        stores_responses: bool = False,
        refusal: str = NO_LOG,
    ):
        self._chat, self._is_lenient, self._ignore_unknown = chat, is_lenient, ignore_unknown or is_lenient
        self._stores_responses, self._refusal = stores_responses, refusal

    def read(
        self,
        data: bytes,
        request_id: str,
        before: Sequence[Json] = (),
        stored_media: Callable[[str], bytes | None] = _no_media,
    ) -> ParsedRequest:
        """Parse a body. Base64 media are decoded separately from the JSON. Raises ApiError.

        `request_id` is used unless the body has a request_id. `before`: the input and output items of the
        previous responses. `stored_media` returns a medium of these items, given the medium's SHA-256 in hex.
        """
        return read_without_payloads(
            data, partial(self._read, request_id=request_id, before=before, stored_media=stored_media)
        )

    def _read(
        self,
        data: bytes,
        payloads: MediaPayloads,
        request_id: str,
        before: Sequence[Json],
        stored_media: Callable[[str], bytes | None],
    ) -> ParsedRequest:
        ignored = FIELDS.check(data, ignore_unknown=self._ignore_unknown, is_lenient=self._is_lenient)
        unsupported = Unsupported(ignored, is_lenient=self._is_lenient)
        body = decode_body(data, decode)
        self._check(body, before, unsupported)
        conversation = Conversation(body.request_id or request_id, payloads, stored_media, unsupported)
        if body.instructions:
            conversation.add_instructions(body.instructions)
        conversation.add_previous(before)
        conversation.add_input(body.input)
        if not conversation.messages:
            text = f"{FIELD} contains no message and no call; add a user message"
            raise ApiError(ErrorCode.INVALID_VALUE, text, FieldPath("input"))
        tools = chat_tools(body.tools or (), unsupported)
        names = FieldNames(
            tuple(conversation.places),
            RENAMES,
            tools=tuple(tools),
            allowed=allowed_places(body.tool_choice),
        )
        chat = _as_chat(body, conversation.finished(), list(tools.values()) or None, unsupported)
        try:
            parsed_request = self._chat.parse(
                "responses", chat, request_id, ignored, larks=enforced_larks(body.tools or ())
            )
        except ApiError as error:
            raise error.renamed(names.path) from None
        parsed_request = msgspec.structs.replace(
            parsed_request,
            usage_frames="last",
            field_names=names,
            media=conversation.media,
            uploads=[each._replace(where=upload_place(each.where, names)) for each in parsed_request.uploads],
        )
        is_stored = self._stores_responses and body.store is not False
        echo_json = _make_echo(body, parsed_request, conversation.items, tools, is_stored)
        envelope = msgspec.structs.replace(parsed_request.envelope, usage_frames="last", responses=echo_json)
        return msgspec.structs.replace(parsed_request, envelope=envelope)

    def _check(self, body: ResponsesBody, before: Sequence[Json], unsupported: Unsupported) -> None:
        """Raise ApiError for field values and field combinations that this server does not support."""
        if body.background and body.store is False:
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                f"background requires {FIELD}=true, which is the default",
                FieldPath("store"),
            )
        for field in ("background", "store"):
            if getattr(body, field) and not self._stores_responses:
                raise ApiError(ErrorCode.UNSUPPORTED_FIELD, f"{FIELD} {self._refusal}", field)
        name = body.previous_response_id
        if name is not None and not before:
            text = f"the previous response {shown(name)} does not exist; send its items as input"
            raise ApiError(ErrorCode.PREVIOUS_RESPONSE_NOT_FOUND, text, FieldPath("previous_response_id"))
        most = self._chat.max_messages
        if not isinstance(body.input, str) and len(body.input) > most:
            text = f"{FIELD} has {len(body.input)} items; the limit is {most} (max_messages)"
            raise ApiError(ErrorCode.INVALID_VALUE, text, FieldPath("input"))
        for place, one in enumerate(body.include or ()):
            if one not in _INCLUDED:
                text = f"{FIELD}[{place}]={shown(one)} is not supported; use {LOGPROBS}"
                unsupported.leave_out(
                    ApiError(ErrorCode.UNSUPPORTED_FIELD, text, FieldPath("include")), shown(one)
                )
        for place, entry in enumerate(body.context_management or ()):
            threshold = entry.get("compact_threshold")
            is_idle = isinstance(threshold, int) and threshold >= self._chat.max_model_len
            if entry.get("type") != "compaction" or not is_idle:
                text = f"{FIELD} is not supported, because context is never compacted; send a shorter input"
                where = FieldPath("context_management", place)
                raise ApiError(ErrorCode.UNSUPPORTED_FIELD, text, where)
        if body.top_logprobs and LOGPROBS not in (body.include or ()):
            raise ApiError(
                ErrorCode.INVALID_VALUE, f"{FIELD} requires {LOGPROBS} in include", FieldPath("top_logprobs")
            )


def _as_chat(
    body: ResponsesBody, messages: list[Json], tools: list[Json] | None, unsupported: Unsupported
) -> ChatBody:
    """Return the equivalent chat body. Raises ApiError."""
    logprobs, stream_options = LOGPROBS in (body.include or ()), None
    if body.stream_options is not None:
        stream_options = StreamOptions(include_obfuscation=body.stream_options.include_obfuscation)
    return ChatBody(
        messages=messages,
        tools=tools,
        tool_choice=chat_choice(body.tool_choice, unsupported),
        response_format=chat_form(body.text),
        stream_options=stream_options,
        max_completion_tokens=body.max_output_tokens,
        reasoning_effort=body.reasoning.effort if body.reasoning is not None else None,
        logprobs=logprobs,
        top_logprobs=body.top_logprobs if logprobs else None,
        **{name: getattr(body, name) for name in AS_CHAT},
    )


def _make_echo(
    body: ResponsesBody,
    parsed_request: ParsedRequest,
    items: list[Json],
    tool_numbers: Iterable[int],
    is_stored: bool,
) -> ResponseEcho:
    """Return the parameters that the response object repeats. `tool_numbers`: indices in `body.tools` of the
    tools that were not ignored.
    """
    effort = body.reasoning.effort if body.reasoning is not None else None
    return ResponseEcho(
        instructions=body.instructions,
        tools=echo_tools([(body.tools or ())[number] for number in tool_numbers]),
        tool_choice=echo_json(body.tool_choice or "auto", ANY_TOOL),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        text=echo_text(body.text),
        reasoning=echo_json({"effort": effort, "summary": None}, NO_REASONING),
        temperature=parsed_request.sampling.temperature,
        top_p=parsed_request.sampling.top_p,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        top_logprobs=body.top_logprobs or 0,
        previous_response_id=body.previous_response_id,
        metadata=body.metadata or {},
        user=body.user,
        safety_identifier=body.safety_identifier,
        prompt_cache_key=body.prompt_cache_key,
        background=bool(body.background),
        store=is_stored,
        input=echo_json(items, NOTHING) if is_stored else NOTHING,
    )


class ContinuationReader:
    """Parses bodies that continue stored responses. `items` and `media` are the items and the media of these
    responses.
    """

    def __init__(self, reader: ResponsesReader, items: Sequence[Json], media: Mapping[str, bytes]):
        self._reader, self._items, self._media = reader, items, media

    def read(self, data: bytes, request_id: str) -> ParsedRequest:
        return self._reader.read(data, request_id, self._items, self._media.get)


RENAMES: Renames = (
    (("tool_choice", "allowed_tools", "tools", INDEX, "function"), ("tool_choice", "tools", INDEX)),
    (("tool_choice", "allowed_tools"), ("tool_choice",)),
    (("tool_choice", "function"), ("tool_choice",)),
    (("tools", INDEX, "function"), ("tools", INDEX)),
    (("response_format", "json_schema"), ("text", "format")),
    (("response_format",), ("text", "format")),
    (("max_completion_tokens",), ("max_output_tokens",)),
    (("messages",), ("input",)),
)


def upload_place(where: FieldPath, names: FieldNames) -> FieldPath:
    """Return the path of an uploaded image's file_id in the client's body. `where`: the image's path in the
    chat body.
    """
    path = names.path(where)
    return FieldPath(*path[:-1], "file_id") if path[-1] == "image_url" else path / "file_id"
