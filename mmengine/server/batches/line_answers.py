"""Answers to a batch's lines, made by the same readers and frames as live calls. Recovered requests go on
where the last process ended.
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
from mmengine.server.batches.recovered_rows import RecoveredRows, discard_stream
from mmengine.server.batches.weighted_semaphore import WeightedSemaphore
from mmengine.server.chat.chat_frames import Frames
from mmengine.server.chat.parsed_request import Envelope, ParsedRequest
from mmengine.server.chat.response_builder import ResponseBuilder
from mmengine.server.chat.submission import prompt_request_id, submit
from mmengine.server.chat.uploaded_images import UploadedImages
from mmengine.server.http.errors import ApiError, api_error

AGAIN = (409, 429, 503)  # statuses after which a line is tried again


class LineReader(Protocol):
    """The part of the answer routes that a line needs."""

    uploads: UploadedImages

    def read_line(self, endpoint: str, data: bytes, name: str, owner: str) -> ParsedRequest:
        """Parse a line's body. `name`: the request's id. Thread-safe. Raises ApiError."""

    def frames_of(self, parsed_request: ParsedRequest) -> Frames: ...

    def to_api_error(self, error: BaseException, parsed_request: ParsedRequest) -> BaseException:
        """Return an engine error as the caller gets it."""


class LineOutcome(NamedTuple):
    """The outcome for a line. `body`: an answer or an error. `written`: call it when the body is safe on the
    disk.
    """

    status: int
    body: bytes
    written: Callable[[], None]


class LineAnswers:
    """Answers lines for all batches. `seats`: limits the choices in flight. `priority`: the highest priority
    that a line may have.
    """

    def __init__(
        self,
        engine: ServedEngine,
        reader: LineReader,
        recovered_rows: RecoveredRows,
        seats: WeightedSemaphore,
        priority: int,
    ):
        self._engine, self._reader, self._seats, self._priority = engine, reader, seats, priority
        self.recovered_rows = recovered_rows
        # a thread of its own: live calls do not wait for lines
        self._parser = ThreadPoolExecutor(1, "mmengine-parse-batch")
        self.leaves = False  # whether requests that are cancelled from now on stay in the log

    async def answer(
        self, endpoint: str, body: bytes, name: str, owner: str, accepted: Callable[[], None]
    ) -> LineOutcome:
        """Return the outcome for a line. `accepted`: called when the log has the request. Raises ApiError
        with a status in AGAIN.
        """
        try:
            parsed_request = await asyncio.get_running_loop().run_in_executor(
                self._parser, self._reader.read_line, endpoint, body, name, owner
            )
        except ApiError as error:
            return _refused(error)
        amount = await self._seats.take(parsed_request.sampling.n * len(parsed_request.prompts))
        try:
            return await self._answer(parsed_request, accepted)
        finally:
            self._seats.give(amount)

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
                if self.leaves:  # the log may have the request although its acceptance was not reported yet
                    stream.leave()
                else:
                    discard_stream(stream)
            raise
        return LineOutcome(200, body, partial(_delivered, streams))

    async def _streams(self, parsed_request: ParsedRequest) -> tuple[ParsedRequest, Sequence[Stream]]:
        """Return the recovered streams with the request as accepted then, if all of them exist; otherwise
        submit the request.
        """
        several = len(parsed_request.prompts)
        envelope = msgspec.structs.replace(parsed_request.envelope, num_prompts=several)
        names = [prompt_request_id(envelope, parsed_request.request_id, place) for place in range(several)]
        found = self.recovered_rows.pop(names)
        if len(found) == several:
            parsed_request.prompts.clear()
            envelope = msgspec.json.decode(found[0].envelope, type=Envelope)
            return msgspec.structs.replace(parsed_request, envelope=envelope), [each.stream for each in found]
        for each in found:  # the others were never accepted: all are asked again, when these are gone
            discard_stream(each.stream)
        await self._reader.uploads.fill(parsed_request)
        parsed_request = msgspec.structs.replace(
            parsed_request, priority=max(parsed_request.priority, self._priority)
        )
        return parsed_request, submit(self._engine, parsed_request, hold=True)


def failed(name: str, error: Exception, streams: Sequence[Stream] = ()) -> LineOutcome:
    """Log an unexpected error, and return the outcome for a line that could not be read or answered. `name`:
    the request's id.
    """
    operator_log.error("a line of a batch failed", id=name, reason=in_one_line(error))
    return _refused(api_error(error), streams)


def _refused(error: ApiError, streams: Sequence[Stream] = ()) -> LineOutcome:
    return LineOutcome(error.status, error.json(), partial(_delivered, streams))


def _delivered(streams: Sequence[Stream]) -> None:
    for stream in streams:
        stream.delivered()
