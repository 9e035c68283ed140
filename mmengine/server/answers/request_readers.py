"""Parses the request bodies of all APIs, and resolves model names. Also converts the engine's errors to
errors that name the client's fields.
"""

from typing import Protocol

import msgspec

from mmengine.errors import FIELD, ErrorCode, FieldPath
from mmengine.processing.fetch.fetcher import MediaFetcher
from mmengine.serve.async_engine.served_engine import ServedEngine
from mmengine.serve.prompt.tools import ToolLimits
from mmengine.server.answers.headers import MAX_ID_CHARS, is_request_id
from mmengine.server.calls.call_identity import ITS_ID, key_in_use
from mmengine.server.chat.chat_frames import ChatFrames, Frames
from mmengine.server.chat.chat_reader import ChatReader, ToolSupport
from mmengine.server.chat.completion_frames import CompletionFrames
from mmengine.server.chat.completion_reader import CompletionReader
from mmengine.server.chat.message_media import PixelLimits
from mmengine.server.chat.obfuscation import ObfuscatedFrames
from mmengine.server.chat.parsed_request import AnswerFormat, ParsedRequest, SamplingDefaults
from mmengine.server.chat.request_media import RequestMedia
from mmengine.server.chat.token_texts import TokenTexts
from mmengine.server.chat.uploaded_images import UploadedImages
from mmengine.server.http.admission import Admission
from mmengine.server.http.body_reader import ParserThreads
from mmengine.server.http.errors import ApiError, ClientLeft, api_error
from mmengine.server.http.field_names import FieldNames
from mmengine.server.http.model_names import ModelNames
from mmengine.server.messages.frames import MessagesFrames
from mmengine.server.messages.reader import MessagesReader
from mmengine.server.responses.frames import ResponsesFrames
from mmengine.server.responses.reader import IN_BATCH, ResponsesReader
from mmengine.server.settings import ServerSettings
from mmengine.server.storage.storage import Storage

# Endpoints for the lines of a batch file.
LINE_ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
# Maps field names in the engine's errors to the client's names. For example, `grammar.lark` and
# `grammar.gbnf` are both `structured_outputs.grammar`.
_GRAMMAR_NAMES = FieldNames(
    (),
    (
        (("grammar", "lark"), ("structured_outputs", "grammar")),
        (("grammar", "gbnf"), ("structured_outputs", "grammar")),
        (("grammar",), ("structured_outputs",)),
    ),
)


class Reader(Protocol):
    """Parses a call's body into a request for the engine."""

    def read(self, data: bytes, request_id: str) -> ParsedRequest: ...


class RequestReaders:
    """The readers for all APIs, with the server's limits and defaults.

    `names`: the served names of the model and its adapters. `storage`: uploaded files and stored responses;
    None for a server without a log.
    """

    def __init__(
        self,
        engine: ServedEngine,
        settings: ServerSettings,
        names: ModelNames,
        admission: Admission,
        texts: TokenTexts,
        media_fetcher: MediaFetcher | None,
        storage: Storage | None,
    ):
        self.settings, self._names, self._admission, self._texts = settings, names, admission, texts
        processor = engine.processor
        files = storage.files if storage is not None else None
        self.parser_threads = ParserThreads()
        uploads = UploadedImages(files, settings.max_media_bytes, settings.max_media_urls)
        self.media = RequestMedia(uploads, self.parser_threads)
        defaults = SamplingDefaults(processor.generation_defaults, settings.generation_config)
        ignores = settings.unknown_fields == "ignore"
        is_lenient = settings.unsupported == "lenient"
        limits = ToolLimits(settings.max_tools, settings.max_tool_bytes, settings.strict_tools)
        markers = engine.config.reasoning_start, engine.config.reasoning_end
        self.chat = ChatReader(
            defaults,
            engine.config.max_model_len,
            settings.chat_template,
            PixelLimits.of(settings.max_pixels, processor.max_image_pixels),
            ToolSupport(processor, limits, markers),
            ignores,
            media_fetcher,
            settings.max_messages,
            settings.max_schema_bytes,
            engine.box_unit,
        )
        self.completions = CompletionReader(
            defaults,
            processor.tokenizer,
            settings.max_prompts,
            settings.max_pixels,
            ignores,
            settings.max_schema_bytes,
            processor.max_prompt_tokens,
        )
        self.responses = ResponsesReader(
            self.chat, is_lenient=is_lenient, ignore_unknown=ignores, stores_responses=storage is not None
        )
        batch_responses = ResponsesReader(
            self.chat, is_lenient=is_lenient, ignore_unknown=ignores, refusal=IN_BATCH
        )
        self._line_readers: tuple[Reader, ...] = self.chat, self.completions, batch_responses
        self.messages = MessagesReader(
            self.chat,
            is_lenient=is_lenient,
            ignore_unknown=ignores,
            can_end_reasoning=engine.can_end_reasoning,
        )

    def read(self, reader: Reader, data: bytes, request_id: str, owner: str) -> ParsedRequest:
        """Read a body with `reader`, and resolve the model name. Thread-safe. Raises ApiError."""
        return self.resolve_model(reader.read(data, request_id), owner)

    def read_line(
        self, endpoint: str, data: bytes, name: str, owner: str, custom_id: str = ""
    ) -> ParsedRequest:
        """Read the body of a batch line. `name`: the request's id. `custom_id`: the client's id for the line,
        which is written to the log. Thread-safe. Raises ApiError.
        """
        reader = self._line_readers[LINE_ENDPOINTS.index(endpoint)]
        parsed_request = self.read(reader, data, name, owner)
        if parsed_request.stream:
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                f"{FIELD} is not supported in a batch; leave it out",
                FieldPath("stream"),
            )
        if parsed_request.request_id != name:
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                f"{FIELD} is not supported in a batch; custom_id identifies a line",
                FieldPath("request_id"),
            )
        envelope = msgspec.structs.replace(parsed_request.envelope, custom_id=custom_id)
        return msgspec.structs.replace(parsed_request, envelope=envelope)

    def resolve_model(self, parsed_request: ParsedRequest, owner: str) -> ParsedRequest:
        """Return the request with its served model name, adapter, owner, tenant and cache salt.

        Raises ApiError for an unknown model, and for a request id that is invalid in a header.
        """
        if not is_request_id(parsed_request.request_id):
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                f"{FIELD} must have 1 to {MAX_ID_CHARS} printable ASCII characters without spaces",
                FieldPath("request_id"),
            )
        model, adapter = self._names.resolve(parsed_request.envelope.model)
        envelope = msgspec.structs.replace(parsed_request.envelope, model=model, owner=owner)
        return msgspec.structs.replace(
            parsed_request,
            envelope=envelope,
            adapter=adapter,
            cache_salt=parsed_request.cache_salt or self._admission.salt_of(owner),
            tenant=self._admission.tenant_of(owner),
        )

    def frames_of(self, parsed_request: ParsedRequest) -> Frames:
        """Return the object that formats the answer for the request's API."""
        name, envelope = parsed_request.request_id, parsed_request.envelope
        texts = self._texts if parsed_request.logprobs else None
        usage_frames = parsed_request.usage_frames
        match envelope.api:
            case "responses":
                return ResponsesFrames(name, envelope, texts)
            case "messages":
                return MessagesFrames(name, envelope)
        frames: Frames
        if envelope.api == "chat":
            twice = self.settings.reasoning_fields == "both"
            frames = ChatFrames(name, envelope, texts, usage_frames, names_reasoning_twice=twice)
        else:
            echo_texts, num_choices = parsed_request.echo_texts, parsed_request.sampling.n
            frames = CompletionFrames(name, envelope, texts, usage_frames, echo_texts, num_choices)
        return ObfuscatedFrames(frames) if envelope.is_obfuscated else frames

    def to_api_error(self, error: BaseException, parsed_request: ParsedRequest) -> BaseException:
        """Return an ApiError that names the client's fields. ClientLeft and cancellation are returned
        unchanged.
        """
        if not isinstance(error, Exception) or isinstance(error, ClientLeft):
            return error
        found = api_error(error, parsed_request.params, self._admission.rate.retry_after_s())
        # The engine's message contains the owner, which clients must not see.
        if found.code is ErrorCode.REQUEST_ID_IN_USE:
            return key_in_use((parsed_request.envelope.owner, ITS_ID, parsed_request.request_id))
        found = _with_format_path(found, parsed_request.answer_format)
        names = parsed_request.field_names
        return found if names is None else found.renamed(names.path)


def _with_format_path(error: ApiError, answer_format: AnswerFormat) -> ApiError:
    """Return the error. If the error concerns the answer format, its path names the client's field."""
    if answer_format.grammar is not None and error.path[:1] == ("grammar",):
        return error.at(_GRAMMAR_NAMES.path(error.path))
    if error.code is ErrorCode.INVALID_GRAMMAR and not error.path:
        return error.at(answer_format.place)
    return error
