"""Handlers for existing responses: get, repeat the event stream, cancel, delete, and list input items. Also
collects the previous responses' items for a new response.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from mmengine.errors import ErrorCode, FieldPath
from mmengine.models.plugin import Tokenizer
from mmengine.serve.stream.answer_record import AnswerRecord, AnswerSource, RecordReader
from mmengine.server.calls.call_registry import CallRegistry
from mmengine.server.calls.detached_call import DetachedCall
from mmengine.server.calls.recovered_calls import rebuild_request
from mmengine.server.calls.stored_responses import StoredResponses
from mmengine.server.chat.parsed_request import Envelope, Json
from mmengine.server.chat.response_builder import ResponseBuilder
from mmengine.server.chat.token_texts import TokenTexts
from mmengine.server.http.admission import OWNER
from mmengine.server.http.body_reader import ParserThreads
from mmengine.server.http.errors import ApiError, api_error
from mmengine.server.http.json_values import count_of_values
from mmengine.server.http.pagination import page
from mmengine.server.responses.content_parts import REFERENCE
from mmengine.server.responses.frames import ResponsesFrames
from mmengine.server.responses.response import ID_PREFIX, ResponseObject

# Maximum length of a chain of responses. Each response continues the previous response.
MAX_CHAIN = 1000
MAX_BEFORE_BYTES = 256 * 2**20  # Maximum size in bytes of a chain's items and media.
# Maximum number of JSON values in a chain's inputs. The number of commas, "[" and "{" outside strings stands
# for the number of values, because counting these characters requires no parsing.
MAX_BEFORE_VALUES = 2**20
MAX_LISTED = 100  # Maximum number of items per page.
_LISTED = 20  # Default number of items per page.
_NUMBER = re.compile(r"-?[0-9]{1,18}")
_CANCELLED = "cancelled"
_Streamed = Callable[[ResponseBuilder, str], ASGIApp]


class FoundResponse(NamedTuple):
    """An owner's response. `call`: the call that generates the response, or None for a stored response."""

    request_id: str
    envelope: Envelope
    record: AnswerRecord
    call: DetachedCall | None

    @property
    def was_cancelled(self) -> bool:
        last = self.record.items[-1] if self.record.items else None
        return last is not None and last.code is ErrorCode.CANCELLED


class PreviousItems(NamedTuple):
    """The items of all previous responses, oldest first, and a dict from SHA-256 digests in hex to media."""

    items: list[Json]
    media: dict[str, bytes]


class ResponseRoutes:
    """The routes for existing responses. `streamed`: a function that returns the event stream for a builder
    and an owner.
    """

    def __init__(
        self,
        stored: StoredResponses,
        calls: CallRegistry,
        parser_threads: ParserThreads,
        tokenizer: Tokenizer,
        texts: TokenTexts,
        streamed: _Streamed,
    ):
        self._stored, self._calls, self._parser_threads = stored, calls, parser_threads
        self._tokenizer, self._texts, self._streamed = tokenizer, texts, streamed

    async def get(self, request: Request) -> ASGIApp:
        found = await self._found(request)
        if request.query_params.get("stream") == "true":
            return await self._stream(found, _after(request), request.scope[OWNER])
        return _json(await self._object(found))

    async def _stream(self, found: FoundResponse, after: int, owner: str) -> ASGIApp:
        readers: Sequence[AnswerSource] = [RecordReader(found.record)]
        if found.call is not None:
            readers = found.call.readers()
        builder = self._answering(found, readers, after)
        try:
            await builder.open()
        except BaseException:
            builder.close()
            raise
        return self._streamed(builder, owner)

    async def cancel(self, request: Request) -> ASGIApp:
        """Cancel a response. An ended response stays unchanged."""
        found = await self._found(request)
        if found.call is not None:
            found.call.cancel()
            await found.record.wait_over()
            # After a restart, the server must know that the response was cancelled.
            await self._calls.flush()
        return _json(await self._object(found))

    async def delete(self, request: Request) -> ASGIApp:
        owner, request_id = request.scope[OWNER], _request_id(request)
        call = self._calls.response(owner, request_id)
        if call is not None:
            await self._calls.drop(call)
        if not await self._stored.delete(owner, request_id) and call is None:
            raise _none(request_id)
        await self._calls.settled()
        deletion = {"id": f"{ID_PREFIX}{request_id}", "object": "response", "deleted": True}
        return _json(msgspec.json.encode(deletion))

    async def input_items(self, request: Request) -> ASGIApp:
        """Return a page of the input items, with hashes in place of media data."""
        found = await self._found(request)
        given = await self._input(request.scope[OWNER], found)
        return _json(await self._parser_threads.run(len(given), partial(_page, request, given)))

    async def before(self, owner: str, response_id: str | None, add: Callable[[int], None]) -> PreviousItems:
        """Return the items and media of the chain of responses that ends with `response_id`.

        `add`: a function that is called with each response's and each medium's size in bytes, and may raise
        ApiError. Raises ApiError if a response does not exist or has not ended, or if the chain is too large.
        """
        chain: list[list[Json]] = []
        num_bytes = num_values = 0
        while response_id is not None:
            found = await self._find(owner, response_id.removeprefix(ID_PREFIX))
            if found is None:
                text = f"the previous response {response_id[:256]!r} does not exist; send its items as input"
                raise ApiError(ErrorCode.PREVIOUS_RESPONSE_NOT_FOUND, text, FieldPath("previous_response_id"))
            if not found.record.is_over:
                text = f"the previous response {response_id[:256]!r} is still running; wait for its end"
                raise ApiError(
                    ErrorCode.PREVIOUS_RESPONSE_NOT_FINISHED, text, FieldPath("previous_response_id")
                )
            echo = found.envelope.responses
            assert echo is not None
            body, given = await self._object(found), await self._input(owner, found)
            more = len(body) + len(given)
            num_bytes += more
            _check_room(len(chain) + 1, num_bytes)
            add(more)
            num_values += await self._parser_threads.run(more, partial(count_of_values, bytes(given)))
            _check_room(len(chain) + 1, num_bytes, num_values)
            chain.append(await self._parser_threads.run(more, partial(_items, given, body)))
            response_id = echo.previous_response_id
        items = [item for part in reversed(chain) for item in part]
        media: dict[str, bytes] = {}
        for part in _media_parts(items):
            name = _reference(part).removeprefix(REFERENCE)
            if name not in media and (data := await self._stored.media(name)) is not None:
                media[name] = data
                num_bytes += len(data)
                _check_room(len(chain), num_bytes)
                add(len(data))
        return PreviousItems(items, media)

    async def _found(self, request: Request) -> FoundResponse:
        """Return the response for the id in the request's path. Raises ApiError."""
        request_id = _request_id(request)
        found = await self._find(request.scope[OWNER], request_id)
        if found is None:
            raise _none(request_id)
        return found

    async def _find(self, owner: str, request_id: str) -> FoundResponse | None:
        call = self._calls.response(owner, request_id)
        if call is not None:
            return FoundResponse(request_id, call.envelope, call.record(), call)
        stored = await self._stored.get(owner, request_id)
        if stored is None or stored.answer is None:
            return None
        return FoundResponse(request_id, stored.envelope, AnswerRecord(stored.answer), None)

    async def _input(self, owner: str, found: FoundResponse) -> msgspec.Raw:
        """Return a response's input items as a JSON list."""
        echo = found.envelope.responses
        assert echo is not None
        if echo.is_begun and (stored := await self._stored.get(owner, found.request_id)) is not None:
            echo = stored.envelope.responses or echo
        return echo.input

    def _answering(
        self, found: FoundResponse, readers: Sequence[AnswerSource], after: int = -1
    ) -> ResponseBuilder:
        parsed_request = rebuild_request(found.request_id, found.envelope, readers[0].sampling)
        texts = self._texts if parsed_request.logprobs else None
        frames = ResponsesFrames(found.request_id, found.envelope, texts, after=after)
        return ResponseBuilder(parsed_request, frames, readers, self._tokenizer)

    async def _object(self, found: FoundResponse) -> bytes:
        """Return the response object as JSON, with its current status."""
        response = ResponseObject(found.request_id, found.envelope)
        if not found.record.is_over:
            return response.of("in_progress" if found.record.items else "queued")
        if found.was_cancelled:
            return response.of(_CANCELLED)
        builder = self._answering(found, [RecordReader(found.record)])
        try:
            await builder.open()
            return await builder.whole()
        except Exception as error:
            return response.failed(api_error(error))
        finally:
            builder.close()


class _Output(msgspec.Struct):
    output: list[Json]


_decode_items, _decode_output = msgspec.json.Decoder(list[Json]).decode, msgspec.json.Decoder(_Output).decode


def _items(given: msgspec.Raw, body: bytes) -> list[Json]:
    """Return a response's input and output items. `given`: the input items as JSON. `body`: the response
    object as JSON.
    """
    return [*_decode_items(given), *_decode_output(body).output]


def _page(request: Request, given: msgspec.Raw) -> bytes:
    """Return a page of the input items `given`, as JSON. Raises ApiError."""
    items = _decode_items(given)
    items_page = page(
        request,
        items,
        lambda item: str(item["id"]),
        lambda item: item,
        max_limit=MAX_LISTED,
        default_limit=_LISTED,
    )
    return msgspec.json.encode(items_page)


def _request_id(request: Request) -> str:
    return str(request.path_params["response_id"]).removeprefix(ID_PREFIX)


def _after(request: Request) -> int:
    """Return the number of the client's last event, or -1. Raises ApiError."""
    given = request.query_params.get("starting_after", "-1")
    if not _NUMBER.fullmatch(given):
        raise ApiError(
            ErrorCode.INVALID_VALUE,
            "starting_after must be the sequence_number of an event",
            FieldPath("starting_after"),
        )
    return int(given)


def _none(request_id: str) -> ApiError:
    return ApiError(
        ErrorCode.NOT_FOUND,
        f"the response {ID_PREFIX}{request_id[:256]} does not exist",
        FieldPath("response_id"),
    )


def _check_room(count: int, num_bytes: int, num_values: int = 0) -> None:
    if count > MAX_CHAIN or num_bytes > MAX_BEFORE_BYTES or num_values > MAX_BEFORE_VALUES:
        text = (
            f"the previous responses exceed {MAX_CHAIN} responses, {MAX_BEFORE_BYTES // 2**20} MiB or "
            f"{MAX_BEFORE_VALUES} values; send the important items as input"
        )
        raise ApiError(ErrorCode.INVALID_VALUE, text, FieldPath("previous_response_id"))


def _media_parts(items: Sequence[Json]) -> Iterator[Json]:
    """Yield the content parts in which a hash replaces the medium."""
    for item in items:
        for field in ("content", "output"):
            parts = item.get(field)
            for part in parts if isinstance(parts, list) else ():
                if isinstance(part, dict) and _reference(part):
                    yield part


def _reference(part: Json) -> str:
    for name in ("image_url", "video_url"):
        if isinstance(url := part.get(name), str) and url.startswith(REFERENCE):
            return url
    return ""


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
