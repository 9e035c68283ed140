"""Stores requests so that they survive a restart of the ingress.

    FOLDER/ingress/requests   requests without a stored answer, locked by the ingress
    FOLDER/REPLICA            the log of one replica process, locked by that process

The ingress stores no tokens: the replicas' logs contain them.
"""

import asyncio
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from mmengine.errors import LogError, RequestFailed
from mmengine.events.lock import why_not_held
from mmengine.fleet.choice_progress import logged_outputs
from mmengine.fleet.ledger import Ledger, LedgerEntry
from mmengine.fleet.replica_logs import ReplicaLogs
from mmengine.fleet.wire import Accepted, ReplicaRequest
from mmengine.serve.prompt.prompt import core_ids
from mmengine.serve.text.request_output import RequestOutput

INGRESS = "ingress"  # name of the ingress's folder, below the folder of all logs
REQUESTS = "requests"
OWNER_WAIT_S, OWNER_AGAIN_S = 15.0, 0.05  # time limit and interval of waiting for another ingress to end
NOT_ADOPTED = "requests do not survive the ingress, and store, background, files and batches are off"


class DurableRequests:
    """The durable requests and the replicas' logs below the folder `root`.

    `open_durable_requests` creates instances. An instance belongs to one event loop.
    """

    def __init__(self, root: Path, ledger: Ledger, patience_s: float):
        self.folder, self._ledger = ledger.folder, ledger
        names = [
            name
            for entry in ledger.found.values()
            for name in core_ids(entry.request_id, entry.request.sampling.n)
        ]
        self._logs = ReplicaLogs(root, names, ledger.since, patience_s)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ledger

    def recovered_requests(self) -> list[LedgerEntry]:
        """Return the previous ingress's requests that no caller has claimed yet."""
        return list(self._ledger.found.values())

    def claim(self, request_id: str) -> LedgerEntry:
        """Return a recovered request, and remove the request from `recovered_requests`. Raises KeyError."""
        return self._ledger.found.pop(request_id)

    async def logged_outputs(self, entry: LedgerEntry) -> list[RequestOutput]:
        """Wait until no replica computes the request. Return an output for each choice that the replicas'
        logs contain.
        """
        sampling, names = entry.request.sampling, core_ids(entry.request_id, entry.request.sampling.n)
        logs = await self._logs.answers(names)
        grammar = entry.accepted.grammar
        return await asyncio.to_thread(logged_outputs, entry.request_id, sampling, grammar, logs)

    async def released(self, replica: str, names: Collection[str]) -> None:
        """Wait until `replica` no longer computes the core requests `names`; see RequestKeeper in
        routed_request.py.
        """
        await self._logs.released(replica, names)

    async def accept(self, request: ReplicaRequest, accepted: Accepted) -> None:
        """Store an accepted request; see RequestKeeper. Raises QueueFull and KeepFailed."""
        entry = LedgerEntry(request, accepted)
        writing = asyncio.ensure_future(asyncio.to_thread(self._ledger.put, entry))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            writing.add_done_callback(partial(self._drop_written, request.request_id))
            raise

    def _drop_written(self, request_id: str, writing: "asyncio.Future[None]") -> None:
        """Remove a request that was cancelled during the write."""
        if writing.exception() is None:
            self.drop(request_id)

    def drop(self, request_id: str) -> None:
        """Remove a request. An unknown id is no error."""
        self._ledger.drop(request_id)

    async def settled(self) -> None:
        """Wait until all removals have reached the disk. Raises RequestFailed."""
        try:
            await asyncio.to_thread(self._ledger.sync)
        except OSError as error:
            raise RequestFailed(f"the folder of kept requests cannot be synced: {error.strerror}") from None

    def close(self) -> None:
        """Leave the remaining requests to the next ingress. Closing twice is no error."""
        self._ledger.close()


def open_durable_requests(
    root: Path, patience_s: float, warn: Callable[[str], None]
) -> DurableRequests | None:
    """Open the requests below `root`. If file locks do not work in this folder, call `warn` and return None.

    Waits up to 15 s for another ingress to release the folder, then raises LogError. Raises OSError if the
    folder cannot be used.
    """
    folder = root / INGRESS
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if reason := why_not_held(folder):
        warn(f"{NOT_ADOPTED}: {reason}")
        return None
    until = time.monotonic() + OWNER_WAIT_S
    while True:
        try:
            return DurableRequests(root, Ledger(folder / REQUESTS), patience_s)
        except LogError:
            if time.monotonic() > until:
                raise LogError(
                    f"another ingress keeps its requests in {folder}; end it, or name another --log"
                ) from None
            time.sleep(OWNER_AGAIN_S)
