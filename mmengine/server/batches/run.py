"""Runs a single batch: validates its input file, submits the lines, writes the output files, and sets the
final status.
"""

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, TypeVar
from weakref import WeakValueDictionary

import msgspec

from mmengine.errors import ErrorCode, FieldPath, InvalidRequest, KeepFailed
from mmengine.serve.batch.progress import RequestIndex
from mmengine.serve.requests.operator_log import operator_log
from mmengine.server.batches.line_answers import LineAnswers, LineOutcome, failed
from mmengine.server.batches.lines import Line, answer_line, check_lines, index_of, lines_of
from mmengine.server.batches.output_files import OUTPUT, Answer, BatchFiles
from mmengine.server.batches.weighted_semaphore import WeightedSemaphore
from mmengine.server.http.errors import ApiError
from mmengine.server.storage.batches import Batch, LineError
from mmengine.server.storage.storage import Storage

DISK_AGAIN_S = 5.0  # Seconds until a failed write is repeated, for example when the disk is full.
# Maximum pause in seconds before a request that found no free capacity is tried again.
MAX_PAUSE_S = 30.0
# Minimum number of bytes that a line reserves in `BatchResources.bodies`. Limits the number of waiting small
# lines.
MIN_HELD_BYTES = 2**18
_BYTES_AT_ONCE = 2**16  # Lines are read until they have this many bytes together.
_R = TypeVar("_R")


class BatchResources(NamedTuple):
    """Objects that all batches share.

    `bodies`: limits the bytes of lines that were read but are not yet in the engine. `may_begin`: whether new
    requests may be submitted. `count_line`: called for each written line, with True for an answer and False
    for an error. `turning`: maps a batch id to the lock that is held while the batch's status changes.
    """

    storage: Storage
    answers: LineAnswers
    bodies: WeightedSemaphore
    max_lines: int
    may_begin: Callable[[], bool]
    count_line: Callable[[bool], None]
    turning: "WeakValueDictionary[str, asyncio.Lock]"


class BatchRun:
    """Runs a batch. If `run` is cancelled, another BatchRun can continue the batch, even in a later
    process.
    """

    def __init__(self, batch_id: str, resources: BatchResources):
        self.batch_id, self._resources = batch_id, resources
        self._storage, self._turning = (
            resources.storage,
            resources.turning.setdefault(batch_id, asyncio.Lock()),
        )
        self._stopped = ""  # The final status of a batch that ends before all its lines are answered.
        self._asking: asyncio.Task[None] | None = None
        self._ready: list[tuple[Answer, LineOutcome]] = []  # Answers that wait to be written.
        self._came = asyncio.Event()
        # `_is_asked`: True when no more answers will arrive. `_gives_up`: True if a failed write must not be
        # repeated.
        self._is_asked = self._gives_up = False

    @property
    def batch(self) -> Batch:
        found = self._storage.batches.get(self.batch_id)
        assert found is not None  # Running batches are never deleted.
        return found

    async def cancel(self) -> None:
        """Submit no more lines, and end the batch with the answers received so far. Raises ApiError if the
        batch has ended or is ending.
        """
        async with self._turning:
            batch = self.batch
            if batch.status in ("cancelling", "cancelled"):
                return
            if batch.status not in ("validating", "in_progress"):
                text = f"the batch is {batch.status}; only a validating or running batch can be cancelled"
                raise ApiError(ErrorCode.BATCH_NOT_CANCELLABLE, text, FieldPath("batch_id"))
            await self._storage.batches.save(batch.turned("cancelling", self._storage.clock()))
        self._stop("cancelled")

    def look(self) -> None:
        """Stop the run if the batch was cancelled, or if its completion window has passed."""
        batch = self.batch
        if self._stopped:
            return
        if batch.status == "cancelling":
            self._stop("cancelled")
        elif batch.status in ("validating", "in_progress") and self._storage.clock() >= batch.expires_at:
            self._stop("expired")

    def _stop(self, status: str) -> None:
        # A task that was cancelled before may still be cleaning up, and must not be cancelled again.
        if self._asking is not None and not self._stopped:
            self._asking.cancel()
        self._stopped = status

    async def run(self) -> None:
        """Run the batch to its end. After KeepFailed or OSError, the batch may be run again."""
        self.look()
        try:
            requests = await self._validated()
            if requests is not None:
                await self._answer_all(requests)
        except InvalidRequest as error:
            await self._fail([LineError("output_damaged", str(error))])
        except FileNotFoundError:
            await self._fail([LineError("file_lost", "a file of the batch was deleted")])
        if not self.batch.is_live:
            self._resources.answers.recovered_rows.drop(self.batch.owner, self.batch_id)

    async def _validated(self) -> RequestIndex | None:
        """Return the index of the input's lines. If the input file has errors, sets the batch to failed
        and returns None.
        """
        batch, files = self.batch, self._storage.files
        path = files.path(batch.input_file_id)
        if batch.status != "validating":
            return await self._disk(lambda: index_of(path))
        requests, errors = await self._disk(
            lambda: check_lines(path, batch.endpoint, self._resources.max_lines)
        )
        if errors:
            await self._fail(errors)
            return None
        await self._turn("in_progress")
        return requests

    async def _fail(self, errors: list[LineError]) -> None:
        async with self._turning:
            batch = msgspec.structs.replace(
                self.batch.turned("failed", self._storage.clock()), errors=tuple(errors)
            )
            await self._storage.batches.save(batch)

    async def _turn(self, status: str) -> None:
        async with self._turning:
            if self.batch.status not in ("cancelling", status):
                await self._storage.batches.save(self.batch.turned(status, self._storage.clock()))

    async def _answer_all(self, requests: RequestIndex) -> None:
        batch = self.batch
        out = await self._disk(lambda: BatchFiles(self._storage.files, batch, requests))
        try:
            self._storage.batches.count(self.batch_id, out.counts)
            self._is_asked, self._gives_up = False, True
            writing = asyncio.create_task(self._write(out))
            try:
                await self._ask_all(requests, out)
                self._gives_up = False
            finally:
                self._is_asked = True
                self._came.set()
                await writing
            if self._stopped == "expired":
                await self._disk(lambda: out.expire(self._name))
            elif not self._stopped and len(out.answered) < len(requests):
                # Only a bug can cause this. The next run submits the missing lines again.
                raise KeepFailed("some lines were not submitted")
            await self._end(out)
        finally:
            await asyncio.shield(self._disk(out.close))

    async def _end(self, out: BatchFiles) -> None:
        storage = self._storage
        if not self._stopped:
            await self._turn("finalizing")
        now = storage.clock()
        written = await self._disk(lambda: out.finish(int(now)))
        async with self._turning:
            self.look()
            kinds = {file.file_id == self.batch.file_id(OUTPUT): file.file_id for file in written}
            batch = msgspec.structs.replace(
                self.batch.turned(self._stopped or "completed", now),
                counts=out.counts,
                output_file_id=kinds.get(True, ""),
                error_file_id=kinds.get(False, ""),
            )
            await storage.batches.end(batch, written, storage.files)

    # Submitting lines

    async def _ask_all(self, requests: RequestIndex, out: BatchFiles) -> None:
        """Submit lines until all lines are answered or the run is stopped."""
        if self._stopped or len(out.answered) == len(requests):
            return
        asking = self._asking = asyncio.create_task(self._feed(requests, out))
        try:
            await asyncio.wait([asking])
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        if not asking.cancelled():
            asking.result()
        elif not self._stopped:
            raise asyncio.CancelledError

    async def _feed(self, requests: RequestIndex, out: BatchFiles) -> None:
        path = self._storage.files.path(self.batch.input_file_id)
        lines = lines_of(path, requests, set(out.answered))
        tasks: set[asyncio.Task[None]] = set()
        try:
            while some := await self._disk(lambda: _some(lines)):
                for line in some:
                    while not self._resources.may_begin():
                        await asyncio.sleep(1)
                    held = _HeldBody(
                        self._resources.bodies,
                        await self._resources.bodies.take(max(len(line.body), MIN_HELD_BYTES)),
                    )
                    task = asyncio.create_task(self._ask(line, held))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
            if tasks:
                await asyncio.wait(tasks)
        finally:
            left = list(tasks)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def _ask(self, line: Line, held: "_HeldBody") -> None:
        batch, name, pause_s = self.batch, self._name(line.number), 0.5
        try:
            while True:
                try:
                    outcome = await self._resources.answers.answer(
                        batch.endpoint, line.body, name, batch.owner, held.release, line.custom_id
                    )
                    break
                except ApiError as error:
                    operator_log.info("a line of a batch waits", id=name, reason=str(error))
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, MAX_PAUSE_S)
                except Exception as error:  # A bug with one line must not stop the other lines.
                    outcome = failed(name, error)
                    break
        finally:
            held.release()
        is_good = outcome.status == 200
        text = answer_line(name, line.custom_id, outcome.status, outcome.body)
        self._ready.append((Answer(line.place, text, is_good), outcome))
        self._came.set()

    def _name(self, number: int) -> str:
        """Return the request id for the line with this number."""
        return f"{self.batch_id}-{number}"

    # Writing answers

    async def _write(self, out: BatchFiles) -> None:
        """Write answers as they arrive. Returns when no more answers will arrive and all answers are
        written.
        """
        while self._ready or not self._is_asked:
            await self._came.wait()
            self._came.clear()
            some = list(self._ready)
            answers = [answer for answer, _ in some]
            try:
                await self._disk(partial(out.write, answers))
            except OSError as error:
                operator_log.error("a batch cannot be written", id=self.batch_id, reason=error.strerror)
                if self._is_asked and self._gives_up:
                    return  # The next run gets these answers from the log.
                await asyncio.sleep(DISK_AGAIN_S)
                self._came.set()
                continue
            del self._ready[: len(some)]
            self._storage.batches.count(self.batch_id, out.counts)
            for answer, outcome in some:
                outcome.written()
                self._resources.count_line(answer.is_good)
            if self._ready or self._is_asked:
                self._came.set()

    async def _disk(self, work: Callable[[], _R]) -> _R:
        return await asyncio.get_running_loop().run_in_executor(self._storage.files.threads, work)


class _HeldBody:
    """A line's reservation in `BatchResources.bodies`, until `release`."""

    def __init__(self, room: WeightedSemaphore, amount: int):
        self._room, self._amount = room, amount

    def release(self) -> None:
        amount, self._amount = self._amount, 0
        self._room.give(amount)


def _some(lines: Iterator[Line]) -> list[Line]:
    """Return the next lines: together at least _BYTES_AT_ONCE bytes, unless the file ends."""
    found: list[Line] = []
    num_bytes = 0
    while num_bytes < _BYTES_AT_ONCE and (line := next(lines, None)) is not None:
        found.append(line)
        num_bytes += len(line.body)
    return found
