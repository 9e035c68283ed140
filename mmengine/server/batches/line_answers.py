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
from mmengine.server.batches.recovered_rows import RowsLeft, let_go
from mmengine.server.batches.weighted_semaphore import Room
from mmengine.server.chat.chat_frames import Frames
from mmengine.server.chat.parsed_request import Asked, Envelope
from mmengine.server.chat.response_builder import Answering
from mmengine.server.chat.submission import ask, log_id
from mmengine.server.chat.uploaded_images import UploadedImages
from mmengine.server.http.errors import ApiError, api_error

AGAIN = (409, 429, 503)  # statuses after which a line is tried again


class LineReader(Protocol):
    """The part of the answer routes that a line needs."""

    uploads: UploadedImages

    def read_line(self, endpoint: str, data: bytes, name: str, owner: str) -> Asked:
        """Parse a line's body. `name`: the request's id. Thread-safe. Raises ApiError."""

    def frames_of(self, asked: Asked) -> Frames: ...

    def told(self, error: BaseException, asked: Asked) -> BaseException:
        """Return an engine error as the caller gets it."""


class Answered(NamedTuple):
    """The outcome for one line. `body`: an answer or an error. `written`: call it when the body is safe on
    the disk.
    """

    status: int
    body: bytes
    written: Callable[[], None]


class LineAnswers:
    """Answers lines for all batches. `seats`: limits the choices in flight. `priority`: the highest priority
    that a line may have.
    """

    def __init__(
        self, engine: ServedEngine, reader: LineReader, rows_left: RowsLeft, seats: Room, priority: int
    ):
        self._engine, self._reader, self._seats, self._priority = engine, reader, seats, priority
        self.rows_left = rows_left
        # a thread of its own: live calls do not wait for lines
        self._parser = ThreadPoolExecutor(1, "mmengine-parse-batch")
        self.leaves = False  # whether requests that are cancelled from now on stay in the log

    async def answer(
        self, endpoint: str, body: bytes, name: str, owner: str, accepted: Callable[[], None]
    ) -> Answered:
        """Return the outcome for one line. `accepted`: called when the log has the request. Raises ApiError
        with a status in AGAIN.
        """
        try:
            asked = await asyncio.get_running_loop().run_in_executor(
                self._parser, self._reader.read_line, endpoint, body, name, owner
            )
        except ApiError as error:
            return _refused(error)
        amount = await self._seats.take(asked.sampling.n * len(asked.prompts))
        try:
            return await self._answer(asked, accepted)
        finally:
            self._seats.give(amount)

    async def _answer(self, asked: Asked, accepted: Callable[[], None]) -> Answered:
        streams: Sequence[Stream] = ()
        try:
            asked, streams = await self._streams(asked)
            answering = Answering(
                asked, self._reader.frames_of(asked), streams, self._engine.processor.tokenizer
            )
            await answering.open()
            accepted()
            body = await answering.whole()
        except Exception as error:
            told = self._reader.told(error, asked)
            for stream in streams:
                stream.cancel()
            if not isinstance(error, (ApiError, MMEngineError)):
                return failed(asked.request_id, error, streams)
            if isinstance(told, ApiError) and told.status not in AGAIN:
                return _refused(told, streams)
            _delivered(streams)
            raise told from error
        except asyncio.CancelledError:
            for stream in streams:
                if self.leaves:  # the log may have the request although its acceptance was not reported yet
                    stream.leave()
                else:
                    let_go(stream)
            raise
        return Answered(200, body, partial(_delivered, streams))

    async def _streams(self, asked: Asked) -> tuple[Asked, Sequence[Stream]]:
        """Return the recovered streams with the request as accepted then, if all of them exist; otherwise
        submit the request.
        """
        several = len(asked.prompts)
        envelope = msgspec.structs.replace(asked.envelope, num_prompts=several)
        names = [log_id(envelope, asked.request_id, place) for place in range(several)]
        found = self.rows_left.pop(names)
        if len(found) == several:
            asked.prompts.clear()
            envelope = msgspec.json.decode(found[0].envelope, type=Envelope)
            return msgspec.structs.replace(asked, envelope=envelope), [each.stream for each in found]
        for each in found:  # the others were never accepted: all are asked again, when these are gone
            let_go(each.stream)
        await self._reader.uploads.fill(asked)
        asked = msgspec.structs.replace(asked, priority=max(asked.priority, self._priority))
        return asked, ask(self._engine, asked, hold=True)


def failed(name: str, error: Exception, streams: Sequence[Stream] = ()) -> Answered:
    """Of a request that nobody knew how to read or to answer. `name`: of it."""
    operator_log.error("a line of a batch failed", id=name, reason=in_one_line(error))
    return _refused(api_error(error), streams)


def _refused(error: ApiError, streams: Sequence[Stream] = ()) -> Answered:
    return Answered(error.status, error.json(), partial(_delivered, streams))


def _delivered(streams: Sequence[Stream]) -> None:
    for stream in streams:
        stream.delivered()
