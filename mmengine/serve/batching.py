"""Many prompts through one engine: prepared ahead on worker threads, fed in a bounded window."""

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from mmengine.errors import MMEngineError
from mmengine.models.plugin import Prepared
from mmengine.serve.answers import Completion, engine_failed
from mmengine.serve.prompts import Options, Prompt

if TYPE_CHECKING:
    from mmengine.serve.engine import Engine

Job = tuple[Prompt, Options]
Result = tuple[int, Completion | MMEngineError]
PREPARE_AHEAD = 16  # prompts whose pixels wait in memory for a place
ABANDON_LIMIT_S = 1.0  # how long an end waits for a log that cannot be written


def run_batch(
    engine: "Engine",
    jobs: Iterable[Job | MMEngineError],
    *,
    workers: int = 2,
    drain: threading.Event | None = None,
    stop: threading.Event | None = None,
) -> Iterator[Result]:
    """(index, answer) as the answers come, not in order; a job that is an error, or gives one,
    gives it back at its index and the others go on.

    Jobs enter the engine in order. At most twice as many answers as there are rows are inside at
    once, and never more than `max_waiting`, so that none is rejected for want of a place.
    Once `drain` is set no further job is taken; what runs is finished. `stop`, or leaving the
    iteration early, cancels what runs. Raises InvalidRequest while requests that were submitted
    by hand are on their way: their outputs would be lost.
    """
    engine.check_batchable()
    batch = _Batch(engine, jobs, drain or threading.Event(), stop or threading.Event())
    with ThreadPoolExecutor(workers, thread_name_prefix="mmengine-media") as pool:
        try:
            yield from batch.run(pool)
        finally:
            batch.abandon()


class _Batch:
    def __init__(
        self,
        engine: "Engine",
        jobs: Iterable[Job | MMEngineError],
        drain: threading.Event,
        stop: threading.Event,
    ):
        self._engine = engine
        self._jobs = enumerate(jobs)
        self._drain = drain
        self._stop = stop
        self._more = True
        self._ahead: deque[tuple[int, Options | None, Future[Prepared] | MMEngineError]] = deque()
        self._running: dict[str, tuple[int, int]] = {}  # index and number of answers
        self._inside = 0  # answers on their way
        config = engine.config
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
        self._more = False
        for _, _, future in self._ahead:
            if isinstance(future, Future):
                future.cancel()
        self._ahead.clear()

    def _prepare(self, pool: ThreadPoolExecutor) -> None:
        while self._more and len(self._ahead) < PREPARE_AHEAD:
            job = next(self._jobs, None)
            if job is None:
                self._more = False
            elif isinstance(job[1], MMEngineError):
                self._ahead.append((job[0], None, job[1]))
            else:
                prompt, options = job[1]
                self._ahead.append((job[0], options, pool.submit(prompt.prepare, self._engine.processor)))

    def _submit(self) -> Iterator[Result]:
        """Move prepared jobs into the engine while there is room, the oldest first."""
        while self._ahead:
            index, options, future = self._ahead[0]
            count = options.sampling.n if options is not None else 0
            if self._running and self._inside + count > self._window:
                return  # room comes with the next steps
            if isinstance(future, Future) and not future.done() and self._running:
                return  # compute meanwhile
            self._ahead.popleft()
            error = future if isinstance(future, MMEngineError) else _error_of(future)
            if error is None:
                try:
                    request_id = self._engine.submit_prepared(future.result(), options, stream=False)
                    self._running[request_id] = index, count
                    self._inside += count
                except MMEngineError as refusal:
                    error = refusal
            if error is not None:
                yield index, error

    def _step(self) -> Iterator[Result]:
        done = self._engine.batch_done
        if not any(request_id in self._running for request_id in done):
            self._advance()
        for request_id in [name for name in done if name in self._running]:
            index, count = self._running.pop(request_id)
            self._inside -= count
            yield index, done.pop(request_id)

    def _advance(self) -> None:
        """One step. Its answers may be another batch's, begun between two answers of this one."""
        for output in self._engine.step():
            if output.completion is not None:
                self._engine.batch_done[output.request_id] = output.completion
        self._engine.check_stall()

    def abandon(self) -> None:
        """Cancel what still runs, and forget what was prepared."""
        self._stop_taking()
        for request_id in self._running:
            self._engine.cancel(request_id)
        while self._running and self._engine.has_work:
            self._engine.check_stall(ABANDON_LIMIT_S)
            for _ in self._step():
                pass  # nobody takes it any more


def _error_of(future: Future[Prepared]) -> MMEngineError | None:
    """Why a prompt could not be prepared. A processor's own mistake costs its prompt, not the batch."""
    error = future.exception()
    return None if error is None else engine_failed(error)
