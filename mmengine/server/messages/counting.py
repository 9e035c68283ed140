"""The route /v1/messages/count_tokens. Its handler prepares the prompt with all media, and counts the prompt
tokens.
"""

from functools import partial
from typing import Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from mmengine.serve.async_engine.served_engine import ServedEngine
from mmengine.server.chat.parsed_request import ParsedRequest
from mmengine.server.chat.request_media import RequestMedia
from mmengine.server.http.admission import OWNER, Admission
from mmengine.server.http.body_fields import ignored_header
from mmengine.server.http.body_reader import ParserThreads
from mmengine.server.messages.reader import MessagesReader, check_version
from mmengine.server.transport.sse import unless_gone


class MessageReaders(Protocol):
    """The members of RequestReaders (answers/request_readers.py) that counting needs."""

    messages: MessagesReader
    parser_threads: ParserThreads
    media: RequestMedia

    def resolve_model(self, parsed_request: ParsedRequest, owner: str) -> ParsedRequest: ...

    def to_api_error(self, error: BaseException, parsed_request: ParsedRequest) -> BaseException: ...


class MessageCounts:
    """The route that counts prompt tokens."""

    def __init__(self, engine: ServedEngine, admission: Admission, readers: MessageReaders):
        self._engine, self._admission, self._readers = engine, admission, readers

    async def count(self, request: Request) -> ASGIApp:
        check_version(request.headers.get("anthropic-version", ""))
        owner, readers = request.scope[OWNER], self._readers
        # Counting prepares the prompt, as generation does, so the call needs admission.
        self._admission.take(owner)
        try:
            with self._admission.reserve(owner) as reservation:
                data = await self._admission.bodies.read(request.scope, request.receive, reservation)
                parsed_request = await readers.parser_threads.run(
                    reservation.num_bytes, partial(self._read, data, owner)
                )
                data.clear()
                try:
                    await readers.media.uploads.fill(
                        parsed_request, add=partial(self._admission.bodies.add, reservation)
                    )
                    with unless_gone(request.scope):
                        count = await self._engine.count(parsed_request.prompts[0])
                except Exception as error:
                    raise readers.to_api_error(error, parsed_request) from error
        finally:
            self._admission.give(owner)
        body = msgspec.json.encode({"input_tokens": count})
        return Response(body, 200, ignored_header(parsed_request.ignored), "application/json")

    def _read(self, data: list[bytes], owner: str) -> ParsedRequest:
        """Read the body. Thread-safe. Raises ApiError."""
        return self._readers.resolve_model(self._readers.messages.read_count(b"".join(data), "count"), owner)
