"""Runs all batches that have not ended, as tasks beside clients' calls."""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from weakref import WeakValueDictionary

from mmengine.errors import in_one_line
from mmengine.serve.async_engine.served_engine import ServedEngine
from mmengine.serve.requests.operator_log import operator_log
from mmengine.server.batches.line_answers import LineAnswers, LineReader
from mmengine.server.batches.pooled_lines import PooledLines
from mmengine.server.batches.recovered_rows import RecoveredRows
from mmengine.server.batches.run import BatchResources, BatchRun
from mmengine.server.batches.weighted_semaphore import WeightedSemaphore
from mmengine.server.http.admission import Admission
from mmengine.server.pooling.reader import PooledReader
from mmengine.server.settings import ServerSettings
from mmengine.server.storage.batches import Batch
from mmengine.server.storage.storage import Storage

BODIES_BYTES = 64 * 2**20  # Maximum bytes of lines that were read but are not yet in the engine.
# Batches leave max_num_seqs / FREE_SEATS rows to live calls. The scheduler preempts batch requests to free KV
# blocks, but not to free rows.
FREE_SEATS = 4
LOOK_S = 0.5  # Seconds between two checks for new, cancelled and expired batches.
# Seconds until a failed batch run is repeated, for example after a disk error.
AGAIN_S = 10.0


class BatchRunner:
    """Starts, cancels and watches all batches' runs.

    `reader`: parses lines and renders answers. `pooled_reader`: the same for embeddings and scores.
    `answered` is called for each written line, with True for an answer and False for an error. Must be
    created on the event loop.
    """

    def __init__(
        self,
        storage: Storage,
        engine: ServedEngine,
        reader: LineReader,
        pooled_reader: PooledReader,
        recovered_rows: RecoveredRows,
        admission: Admission,
        settings: ServerSettings,
        answered: Callable[[bool], None] = lambda is_good: None,
    ):
        self._storage = storage
        most = engine.config.max_num_seqs
        seats = max(1, min(most - max(1, most // FREE_SEATS), engine.max_open // 2))
        self._answers = LineAnswers(
            engine,
            reader,
            PooledLines(engine, pooled_reader, admission, settings.batch_priority),
            recovered_rows,
            WeightedSemaphore(seats),
            settings.batch_priority,
        )
        self._resources = BatchResources(
            storage,
            self._answers,
            WeightedSemaphore(BODIES_BYTES),
            settings.max_batch_lines,
            lambda: not admission.is_draining,
            answered,
            WeakValueDictionary(),
        )
        self._runs: dict[str, tuple[BatchRun, asyncio.Task[None]]] = {}
        # Batch id -> monotonic time of the next run, for batches whose last run failed.
        self._not_before: dict[str, float] = {}
        self._woken = asyncio.Event()

    async def create(self, batch: Batch) -> None:
        """Store a batch and start it. After a server restart, the batch continues. Raises QueueFull and
        KeepFailed.
        """
        await self._storage.batches.create(batch)
        self._woken.set()

    async def cancel(self, batch_id: str) -> None:
        """Cancel a batch. Raises KeepFailed, and ApiError if the batch has ended or is ending."""
        run = self._runs[batch_id][0] if batch_id in self._runs else BatchRun(batch_id, self._resources)
        await run.cancel()
        self._woken.set()

    async def run(self) -> None:
        """Run batches until cancelled. Requests that are then in flight stay in the log, and the next process
        continues them.
        """
        try:
            while True:
                self._begin()
                for run, _ in self._runs.values():
                    run.look()
                self._woken.clear()
                try:
                    async with asyncio.timeout(LOOK_S):
                        await self._woken.wait()
                except TimeoutError:
                    continue
        finally:
            self._answers.leaves = True
            tasks = [task for _, task in self._runs.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._answers.recovered_rows.leave()

    def _begin(self) -> None:
        now = time.monotonic()
        for batch in self._storage.batches.live():
            name = batch.batch_id
            if name not in self._runs and self._not_before.get(name, 0.0) <= now:
                run = BatchRun(name, self._resources)
                task = asyncio.create_task(run.run())
                self._runs[name] = run, task
                task.add_done_callback(partial(self._ended, name))

    def _ended(self, name: str, done: asyncio.Task[None]) -> None:
        del self._runs[name]
        self._not_before.pop(name, None)
        self._woken.set()
        if not done.cancelled() and (error := done.exception()) is not None:
            operator_log.error("a batch stopped for now", id=name, reason=in_one_line(error))
            self._not_before[name] = time.monotonic() + AGAIN_S
