"""Runs many prompts through an engine.

Worker threads prepare prompts ahead, while a limited number of answers is in flight. `outputs_of` instead
steps the engine for a single request, whose outputs the caller reads as they are generated.
"""

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from mmengine.config import EngineConfig
from mmengine.errors import MMEngineError, QueueFull
from mmengine.models.plugin import Prepared, Processor
from mmengine.serve.prompt.media_memory import MediaMemory, media_workers
from mmengine.serve.prompt.options import Options
from mmengine.serve.prompt.prompt import Prompt
from mmengine.serve.prompt.prompt_media import PromptMedia
from mmengine.serve.requests.running_requests import RunningRequests
from mmengine.serve.text.request_output import Completion, RequestOutput, engine_failed


class AnsweredJob(NamedTuple):
    """Stands for a job whose answer is already in the answer file."""

    request_id: str
    num_choices: int


Job = tuple[Prompt, Options]
Result = tuple[int, Completion | MMEngineError]
PREPARE_AHEAD = 16  # maximum number of prompts that are prepared ahead of submission
ABANDON_LIMIT_S = 1.0  # seconds for which `abandon` waits for a log that cannot be written


class BatchEngine(Protocol):
    """The engine members that a batch uses. The batch steps the engine."""

    config: EngineConfig
    processor: Processor
    requests: RunningRequests
    media_memory: MediaMemory
    batch_done: dict[str, Completion]

    @property
    def has_work(self) -> bool: ...

    @property
    def stalled(self) -> bool: ...

    def check_batchable(self) -> None: ...

    def check_stall(self, limit_s: float | None = None) -> None: ...

    def submit_prepared(self, prepared: Prepared, options: Options, *, stream: bool = True) -> str: ...

    def step(self, *, received: bool = True) -> list[RequestOutput]: ...

    def cancel(self, request_id: str) -> None: ...


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A job that this process has not submitted. `prepared` is None if the previous process submitted the
    job.
    """

    index: int
    options: Options
    prepared: Future[Prepared] | None


def run_batch(
    engine: BatchEngine,
    jobs: Iterable[Job | MMEngineError | AnsweredJob],
    *,
    received: bool = True,
    drain: threading.Event | None = None,
    stop: threading.Event | None = None,
) -> Iterator[Result]:
    """Yield (index, answer) as soon as each answer is complete, in any order.

    If a job fails, or if `jobs` contains an error instead of a job, the error is yielded as the answer. All
    other jobs continue. Jobs are submitted in order. At most min(2 * max_num_seqs, max_waiting) answers are
    in flight, so that the engine's queue never fills up. If the log contains a previous process's request
    with a job's id, the job resumes this request.

    The log keeps an answer until the caller takes the next answer. With `received` False, the caller must
    call `engine.requests.delivered`. After `drain` is set, no further job is submitted, and running jobs
    finish. Setting `stop`, or leaving the iteration early, cancels running jobs. Raises InvalidRequest if
    other submitted requests are running, since the batch would lose these requests' outputs.
    """
    engine.check_batchable()
    batch = _Batch(engine, jobs, received, drain or threading.Event(), stop or threading.Event())
    try:
        with ThreadPoolExecutor(batch.num_workers, thread_name_prefix="mmengine-media") as pool:
            try:
                yield from batch.run(pool)
            finally:
                batch.abandon()
    finally:
        batch.release_all()


@contextmanager
def outputs_of(engine: BatchEngine, request_id: str) -> Iterator[Iterator[RequestOutput]]:
    """Yield an iterator over a request's outputs.

    The iterator steps the engine. The last output has the completion. Leaving the block cancels a running
    request. If answers for a running batch end meanwhile, `engine.batch_done` stores them.
    """

    def outputs() -> Iterator[RequestOutput]:
        while request_id in engine.requests:
            yield from step()
            engine.check_stall()

    def step() -> list[RequestOutput]:
        matching = []
        for output in engine.step():
            if output.request_id == request_id:
                matching.append(output)
            elif output.completion is not None:
                engine.batch_done[output.request_id] = output.completion
        return matching

    try:
        yield outputs()
    finally:
        engine.cancel(request_id)
        # Step until the cancelled request has ended. A running request would block generate and run_batch.
        while request_id in engine.requests and engine.has_work:
            engine.check_stall(ABANDON_LIMIT_S)
            step()


class _Batch:
    def __init__(
        self,
        engine: BatchEngine,
        jobs: Iterable[Job | MMEngineError | AnsweredJob],
        received: bool,
        drain: threading.Event,
        stop: threading.Event,
    ):
        self._engine = engine
        self._jobs = enumerate(jobs)
        self._received = received
        self._drain = drain
        self._stop = stop
        self._more = True
        self._ahead: deque[_Ahead | tuple[int, MMEngineError]] = deque()
        self._running: dict[str, tuple[int, int]] = {}  # request id -> (job index, number of answers)
        self._inside = 0  # number of answers in flight
        config = engine.config
        self.num_workers = media_workers(config.media_workers)
        self._holding: set[int] = set()  # indices of prepared jobs whose pixels take media memory
        self._stopped = False
        self._awaited = -1  # index of the job that `_submit` waits for, or submitted last
        self._window = min(2 * config.max_num_seqs, config.max_waiting)

    def run(self, pool: ThreadPoolExecutor) -> Iterator[Result]:
        while not self._stop.is_set():
            if self._drain.is_set():
                self._stop_taking()
            self._prepare(pool)
            if not self._engine.stalled:
                yield from self._submit()
            if self._running or self._engine.stalled:
                yield from self._step()
            elif not self._ahead and not self._more:
                return

    def _stop_taking(self) -> None:
        self._more, self._stopped = False, True
        for job in self._ahead:
            if isinstance(job, _Ahead) and job.prepared is not None:
                job.prepared.cancel()
        self._ahead.clear()

    def _prepare(self, pool: ThreadPoolExecutor) -> None:
        while self._more and len(self._ahead) < PREPARE_AHEAD:
            job = next(self._jobs, None)
            if job is None:
                self._more = False
            elif isinstance(job[1], MMEngineError):
                self._ahead.append((job[0], job[1]))
            elif isinstance(job[1], AnsweredJob):
                self._engine.requests.drop_resumed(*job[1])
            else:
                prompt, options = job[1]
                prepared = self._prepared(job[0], prompt, options, pool)
                self._ahead.append(_Ahead(job[0], options, prepared))

    def _prepared(
        self, index: int, prompt: Prompt, options: Options, pool: ThreadPoolExecutor
    ) -> Future[Prepared] | None:
        known_as = options.request_id, options.sampling.n
        if self._engine.requests.can_resume(*known_as):
            return None
        self._engine.requests.drop_resumed(*known_as)
        self._holding.add(index)
        try:
            # PromptMedia fetches the media while other jobs are prepared
            media = PromptMedia(prompt, is_over=lambda: self._stopped)
        except MMEngineError as error:
            return _failed(error)
        prepared = pool.submit(self._prepare_one, index, media, options)
        prepared.add_done_callback(lambda _: media.release())
        return prepared

    def _prepare_one(self, index: int, media: PromptMedia, options: Options) -> Prepared:
        """Prepare a prompt on a worker thread, as soon as media memory is free.

        The job that `_submit` waits for does not wait for memory. Otherwise, later jobs' pixels could fill
        the memory, and `_submit` would never continue.
        """
        memory = self._engine.media_memory
        memory.wait_for_room(lambda: self._stopped or self._awaited == index)
        if self._stopped:
            raise CancelledError
        prepared = media.prompt().prepare(self._engine.processor, options)
        memory.hold((self, index), prepared.media)
        return prepared

    def _submit(self) -> Iterator[Result]:
        """Submit prepared jobs in order, until `_window` answers are in flight."""
        while self._ahead:
            job = self._ahead[0]
            if not isinstance(job, _Ahead):
                self._ahead.popleft()
                yield job
                continue
            if self._running and self._inside + job.options.sampling.n > self._window:
                return  # later steps make room
            if job.prepared is not None and not job.prepared.done() and self._running:
                return  # step the engine while the prompt is prepared
            self._ahead.popleft()
            self._awaited = job.index
            answer = self._begin(job)
            if isinstance(answer, QueueFull) and self._running:
                self._ahead.appendleft(job)
                return  # the media store or the grammar memory is full for now
            self._release(job.index)
            if answer is not None:
                yield job.index, answer

    def _begin(self, job: _Ahead) -> Completion | MMEngineError | None:
        """Submit a job. Returns the job's answer or error if it has already ended, else None."""
        error = None if job.prepared is None else _error_of(job.prepared)
        if error is not None:
            return error
        count = job.options.sampling.n
        try:
            if job.prepared is None:
                request_id, notes = job.options.request_id, job.options.notes
                completion = self._engine.requests.resume(request_id, count, notes=notes)
                if completion is not None:
                    return completion
            else:
                request_id = self._engine.submit_prepared(job.prepared.result(), job.options, stream=False)
        except MMEngineError as refusal:
            return refusal
        self._running[request_id] = job.index, count
        self._inside += count
        return None

    def _step(self) -> Iterator[Result]:
        done = self._engine.batch_done
        if not any(request_id in self._running for request_id in done):
            self._advance()
        for request_id in [name for name in done if name in self._running]:
            index, count = self._running.pop(request_id)
            self._inside -= count
            yield index, done.pop(request_id)

    def _advance(self) -> None:
        """Run a step, and store completed answers in `batch_done`.

        An answer may belong to another batch on the same engine.
        """
        for output in self._engine.step(received=self._received):
            if output.completion is not None:
                self._engine.batch_done[output.request_id] = output.completion
        self._engine.check_stall()

    def abandon(self) -> None:
        """Cancel running requests and drop prepared jobs."""
        self._stop_taking()
        for request_id in self._running:
            self._engine.cancel(request_id)
        while self._running and self._engine.has_work:
            self._engine.check_stall(ABANDON_LIMIT_S)
            for _ in self._step():
                pass  # the answers of cancelled requests are not needed

    def _release(self, index: int) -> None:
        """Release a job's pixels after the job was submitted or dropped."""
        self._holding.discard(index)
        self._engine.media_memory.release((self, index))

    def release_all(self) -> None:
        """Release all jobs' pixels after the workers have ended."""
        for index in list(self._holding):
            self._release(index)


def _failed(error: MMEngineError) -> Future[Prepared]:
    future: Future[Prepared] = Future()
    future.set_exception(error)
    return future


def _error_of(future: Future[Prepared]) -> MMEngineError | None:
    """Return the error if the preparation failed, else None.

    An unexpected exception in a processor fails only the prompt, not the batch.
    """
    error = future.exception()
    return None if error is None else engine_failed(error)
