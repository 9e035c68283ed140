"""Requests that outlive the ingress that accepted them: where they stand, and how they go on.

    FOLDER/ingress/requests   what is owed, locked by the ingress that owes it
    FOLDER/REPLICA            a log of each life of a replica, locked by that

Nothing else is written for it: who computed what is what the replicas' logs say.
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

INGRESS = "ingress"  # below the folder of all logs
REQUESTS = "requests"
OWNER_WAIT_S, OWNER_AGAIN_S = 15.0, 0.05  # for an ingress that is ending
NOT_ADOPTED = "nothing is adopted from logs of the dead, and nothing kept: store, background, files, batches"


class DurableRequests:
    """`root` is the folder of all logs. Made by `open_durable_requests`; belongs to an event loop."""

    def __init__(self, root: Path, ledger: Ledger, patience_s: float):
        self.folder, self._ledger = ledger.folder, ledger
        before = [
            name for kept in ledger.found.values() for name in core_ids(kept.request_id, kept.ask.sampling.n)
        ]
        self._lives = ReplicaLogs(root, before, ledger.since, patience_s)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ledger

    def recovered_requests(self) -> list[LedgerEntry]:
        """Of an ingress before this one, and nobody took them up yet."""
        return list(self._ledger.found.values())

    def take(self, request_id: str) -> LedgerEntry:
        """One of them, the caller's from now on. Raises KeyError."""
        return self._ledger.found.pop(request_id)

    async def heard(self, kept: LedgerEntry) -> list[RequestOutput]:
        """What replicas' logs say of one, choice by choice, when none of them computes it any more."""
        sampling = kept.ask.sampling
        logs = await self._lives.heard(core_ids(kept.request_id, sampling.n))
        return await asyncio.to_thread(logged_outputs, kept.request_id, sampling, kept.begun.grammar, logs)

    async def released(self, replica: str, names: Collection[str]) -> None:
        """As Keeper says."""
        await self._lives.released(replica, names)

    async def accept(self, ask: ReplicaRequest, begun: Accepted) -> None:
        """As Keeper says. Raises QueueFull, KeepFailed."""
        writing = asyncio.ensure_future(asyncio.to_thread(self._ledger.put, LedgerEntry(ask, begun)))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            writing.add_done_callback(partial(self._unkept, ask.request_id))
            raise

    def _unkept(self, request_id: str, writing: "asyncio.Future[None]") -> None:
        """It was given up while it was written."""
        if writing.exception() is None:
            self.drop(request_id)

    def drop(self, request_id: str) -> None:
        """Nobody needs its answer any more. An unknown one is no error."""
        self._ledger.drop(request_id)

    async def settled(self) -> None:
        """Wait until what was dropped before stays so. Raises RequestFailed."""
        try:
            await asyncio.to_thread(self._ledger.sync)
        except OSError as error:
            raise RequestFailed(f"the folder of what is kept cannot be synced: {error.strerror}") from None

    def close(self) -> None:
        """Leave what is left to the next ingress. Closing twice is no error."""
        self._ledger.close()


def open_durable_requests(
    root: Path, patience_s: float, say: Callable[[str], None]
) -> DurableRequests | None:
    """What is kept below `root`; None where locks there do not hold, which is said. Waits for an ingress that
    is ending. Raises LogError where another one has it, OSError."""
    folder = root / INGRESS
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if why := why_not_held(folder):
        say(f"{NOT_ADOPTED}: {why}")
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
