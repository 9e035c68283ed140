"""/v1/messages/count_tokens: a prompt is prepared as that of a message, media included, and counted."""

from functools import partial
from typing import Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from mmengine.serve.async_engine.served_engine import ServedEngine
from mmengine.server.chat.parsed_request import Asked
from mmengine.server.chat.uploaded_images import UploadedImages
from mmengine.server.http.admission import OWNER, Admission
from mmengine.server.http.body_fields import dropped_header
from mmengine.server.http.parser_threads import Parsers
from mmengine.server.messages.reading import MessagesReader, check_version
from mmengine.server.transport.sse import unless_gone


class Answers(Protocol):
    """What reads messages, and says what is wrong with them."""

    messages_reader: MessagesReader
    parsers: Parsers
    uploads: UploadedImages

    def named(self, asked: Asked, owner: str) -> Asked: ...

    def told(self, error: BaseException, asked: Asked) -> BaseException: ...


class MessageCounts:
    def __init__(self, engine: ServedEngine, admission: Admission, answers: Answers):
        self._engine, self._admission, self._answers = engine, admission, answers

    async def count(self, request: Request) -> ASGIApp:
        check_version(request.headers.get("anthropic-version", ""))
        owner, answers = request.scope[OWNER], self._answers
        self._admission.take(owner)  # preparing it may take what preparing a message takes
        try:
            with self._admission.holding(owner) as held:
                data = await self._admission.bodies.read(request.scope, request.receive, held)
                asked = await answers.parsers.run(held.num_bytes, partial(self._read, data, owner))
                data.clear()
                try:
                    await answers.uploads.fill(asked, add=partial(self._admission.bodies.add, held))
                    with unless_gone(request.scope):
                        count = await self._engine.count(asked.prompts[0])
                except Exception as error:
                    raise answers.told(error, asked) from error
        finally:
            self._admission.give(owner)
        said = msgspec.json.encode({"input_tokens": count})
        return Response(said, 200, dropped_header(asked.dropped), "application/json")

    def _read(self, data: list[bytes], owner: str) -> Asked:
        """On any thread. Raises ApiError."""
        return self._answers.named(self._answers.messages_reader.read_count(b"".join(data), "count"), owner)
