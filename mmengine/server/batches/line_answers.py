"""Runs the requests in a batch's lines, with the same readers and response formats as live calls. Requests
recovered from the log continue after their last token.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, Protocol

import msgspec

from mmengine.errors import MMEngineError, in_one_line
from mmengine.serve.async_engine.served_engine import ServedEngine
from mmengine.serve.requests.operator_log import operator_log
from mmengine.serve.stream.request_stream import Stream
from mmengine.server.batches.pooled_lines import POOLED_ENDPOINTS, PooledLines
from mmengine.server.batches.recovered_rows import RecoveredRows, discard_stream
from mmengine.server.batches.weighted_semaphore import WeightedSemaphore
from mmengine.server.chat.chat_frames import Frames
from mmengine.server.chat.parsed_request import Envelope, ParsedRequest
from mmengine.server.chat.request_media import RequestMedia
from mmengine.server.chat.response_builder import ResponseBuilder
from mmengine.server.chat.submission import prompt_request_id, submit
from mmengine.server.http.errors import ApiError, api_error

AGAIN = (409, 429, 503)  # Statuses after which a line is tried again.


class LineReader(Protocol):
    """The methods of `RequestReaders` that are needed to run a line."""

    media: RequestMedia

    def read_line(
        self, endpoint: str, data: bytes, name: str, owner: str, custom_id: str = ""
    ) -> ParsedRequest:
        """Parse a line's body. `name`: the request id. Thread-safe. Raises ApiError."""

    def frames_of(self, parsed_request: ParsedRequest) -> Frames: ...

    def to_api_error(self, error: BaseException, parsed_request: ParsedRequest) -> BaseException:
        """Convert an engine error to the error that the client receives."""


class LineOutcome(NamedTuple):
    """A line's outcome. `body`: the JSON of an answer or an error. Call `written` when the body is durable on
    disk; the log may then delete the answer.
    """

    status: int
    body: bytes
    written: Callable[[], None]


class LineAnswers:
    """Runs lines for all batches.

    `pooled`: runs lines for embeddings and scores. `seats`: limits the number of choices in flight.
    `priority`: the smallest priority value that a line may have; smaller values are scheduled first.
    """

    def __init__(
        self,
        engine: ServedEngine,
        reader: LineReader,
        pooled: PooledLines,
        recovered_rows: RecoveredRows,
        seats: WeightedSemaphore,
        priority: int,
    ):
        self._engine, self._reader, self._seats, self._priority = engine, reader, seats, priority
        self.recovered_rows, self._pooled = recovered_rows, pooled
        # Lines are parsed on a thread of their own, so that live calls do not wait for lines.
        self._parser = ThreadPoolExecutor(1, "mmengine-parse-batch")
        # Whether a cancelled task leaves its requests in the log instead of cancelling them.
        self.leaves = False

    async def answer(
        self,
        endpoint: str,
        body: bytes,
        name: str,
        owner: str,
        accepted: Callable[[], None],
        custom_id: str = "",
    ) -> LineOutcome:
        """Run a line and return its outcome. `accepted` is called when the request is in the log.
        `custom_id`: the client's id for the line. Raises ApiError with a status in AGAIN if the line must be
        tried again.
        """
        if endpoint in POOLED_ENDPOINTS:
            return await self._answer_pooled(endpoint, body, name, owner)
        try:
            parsed_request = await asyncio.get_running_loop().run_in_executor(
                self._parser, self._reader.read_line, endpoint, body, name, owner, custom_id
            )
        except ApiError as error:
            return _refused(error)
        amount = await self._seats.take(parsed_request.sampling.n * len(parsed_request.prompts))
        try:
            return await self._answer(parsed_request, accepted)
        finally:
            self._seats.give(amount)

    async def _answer_pooled(self, endpoint: str, body: bytes, name: str, owner: str) -> LineOutcome:
        try:
            call = await self._pooled.read(endpoint, body, name, owner, self._parser)
            amount = await self._seats.take(len(call.jobs))
            try:
                return LineOutcome(200, await self._pooled.answer(call, self._parser), lambda: None)
            finally:
                self._seats.give(amount)
        except ApiError as error:
            if error.status in AGAIN:
                raise
            return _refused(error)

    async def _answer(self, parsed_request: ParsedRequest, accepted: Callable[[], None]) -> LineOutcome:
        streams: Sequence[Stream] = ()
        try:
            parsed_request, streams = await self._streams(parsed_request)
            builder = ResponseBuilder(
                parsed_request,
                self._reader.frames_of(parsed_request),
                streams,
                self._engine.processor.tokenizer,
            )
            await builder.open()
            accepted()
            body = await builder.whole()
        except Exception as error:
            api_failure = self._reader.to_api_error(error, parsed_request)
            for stream in streams:
                stream.cancel()
            if not isinstance(error, (ApiError, MMEngineError)):
                return failed(parsed_request.request_id, error, streams)
            if isinstance(api_failure, ApiError) and api_failure.status not in AGAIN:
                return _refused(api_failure, streams)
            _delivered(streams)
            raise api_failure from error
        except asyncio.CancelledError:
            for stream in streams:
                if self.leaves:  # The log may contain the request even before `accepted` is called.
                    stream.leave()
                else:
                    discard_stream(stream)
            raise
        return LineOutcome(200, body, partial(_delivered, streams))

    async def _streams(self, parsed_request: ParsedRequest) -> tuple[ParsedRequest, Sequence[Stream]]:
        """Return the request, and a stream for each prompt.

        If every prompt has a recovered stream, the recovered streams are returned, and the request gets its
        envelope (the call's data) from the log. Otherwise the request is submitted.
        """
        several = len(parsed_request.prompts)
        envelope = msgspec.structs.replace(parsed_request.envelope, num_prompts=several)
        names = [prompt_request_id(envelope, parsed_request.request_id, place) for place in range(several)]
        found = self.recovered_rows.pop(names)
        if len(found) == several:
            parsed_request.prompts.clear()
            envelope = msgspec.json.decode(found[0].envelope, type=Envelope)
            return msgspec.structs.replace(parsed_request, envelope=envelope), [each.stream for each in found]
        # Some prompts have no recovered stream, because the engine never accepted them. Cancel the recovered
        # streams, and submit all prompts again.
        for each in found:
            discard_stream(each.stream)
        parsed_request = await self._reader.media.fill(parsed_request)
        parsed_request = msgspec.structs.replace(
            parsed_request, priority=max(parsed_request.priority, self._priority)
        )
        return parsed_request, submit(self._engine, parsed_request, hold=True)


def failed(name: str, error: Exception, streams: Sequence[Stream] = ()) -> LineOutcome:
    """Log an unexpected error in parsing or running a line, and return the line's outcome. `name`: the
    request id.
    """
    operator_log.error("a line of a batch failed", id=name, reason=in_one_line(error))
    return _refused(api_error(error), streams)


def _refused(error: ApiError, streams: Sequence[Stream] = ()) -> LineOutcome:
    return LineOutcome(error.status, error.json(), partial(_delivered, streams))


def _delivered(streams: Sequence[Stream]) -> None:
    for stream in streams:
        stream.delivered()
