"""Reads the replicas' logs, to find each replica's requests and the tokens that the replica computed.

Each replica process writes a separate log, and holds the log's lock. If the lock is free, the log is
complete. Otherwise the lock's holder may still compute the log's unfinished requests. No other replica
computes these requests until the holder has ended them.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from mmengine.core.resume import Resume, read_resume_state
from mmengine.core.undelivered_answers import ResumedAnswer
from mmengine.errors import LogError
from mmengine.events.lock import is_locked
from mmengine.events.segment import segment_paths
from mmengine.serve.requests.operator_log import operator_log

FIRST_LOOK_S, LONGEST_PAUSE_S = 0.05, 2.0  # shortest and longest time, in seconds, between two reads of a log
SLACK_S = 600.0  # tolerance for clocks that differ, in seconds


class _LogState(NamedTuple):
    """What a log contained when it was read.

    `looked_at`: monotonic time at which the read began. `is_known`: whether the log was readable. `answers`:
    core id -> answer, for unfinished requests and for the `wanted` requests in ReplicaLogs.
    """

    looked_at: float
    is_locked: bool
    is_known: bool
    answers: dict[str, ResumedAnswer]

    def num_tokens(self, core_ids: Collection[str]) -> int:
        """Return the number of tokens that this log has for these requests."""
        return sum(len(self.answers[name].token_ids) for name in core_ids if name in self.answers)

    def has_open(self, core_ids: Collection[str]) -> bool:
        """Return whether a live process may still be computing one of these requests."""
        if not self.is_locked:
            return False
        found = (self.answers.get(core_id) for core_id in core_ids)
        return not self.is_known or any(each is not None and not each.reason for each in found)


class ReplicaLogs:
    """The logs below the folder `root`. Each log is in a folder with its replica's name.

    `wanted`: core ids of requests that earlier processes began. `since`: the Unix time at which the oldest of
    these requests began. If a replica makes no progress, a warning is logged every `patience_s` seconds, and
    the wait continues. An instance belongs to one event loop.
    """

    def __init__(
        self, root: Path, wanted: Collection[str] = (), since: float = 0.0, patience_s: float = 120.0
    ):
        self._root, self._wanted, self._since = root, frozenset(wanted), since
        self._patience_s = patience_s
        self._before = list(self._logs_before()) if wanted else []
        self._seen: dict[Path, _LogState] = {}
        self._turns: defaultdict[Path, asyncio.Lock] = defaultdict(asyncio.Lock)

    def _logs_before(self) -> Iterator[Path]:
        """Yield logs that may contain wanted requests, and unreadable logs."""
        for log in sorted(self._root.iterdir()):
            try:
                written = [path.stat().st_mtime for path in segment_paths(log)] if log.is_dir() else []
            except (LogError, OSError):
                yield log
                continue
            if written and max(written) >= self._since - SLACK_S:
                yield log

    async def released(self, replica: str, core_ids: Collection[str]) -> None:
        """Wait until no live process can still compute the requests, according to the replica's log."""
        await self._settled(self._root / replica, core_ids)

    async def answers(self, core_ids: Collection[str]) -> list[dict[str, ResumedAnswer]]:
        """For each log that may contain wanted requests, return a dict from core id to answer.

        Waits until no live process can still compute one of the requests.
        """
        found = [await self._settled(log, core_ids) for log in self._before]
        return [{name: life.answers[name] for name in core_ids if name in life.answers} for life in found]

    async def _settled(self, log: Path, core_ids: Collection[str]) -> _LogState:
        pause, last_count, news_at = FIRST_LOOK_S, -1, time.monotonic()
        while (life := await self._look(log, time.monotonic())).has_open(core_ids):
            if (count := life.num_tokens(core_ids)) != last_count:
                last_count, news_at = count, time.monotonic()
            elif time.monotonic() - news_at > self._patience_s:
                operator_log.warning("a live replica makes no progress; end it", replica=log.name)
                news_at = time.monotonic()
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
        return life

    async def _look(self, log: Path, since: float) -> _LogState:
        """Return a log's state. An incomplete log is read again, unless it was read at the monotonic time
        `since` or later. Concurrent callers share a single read.
        """
        async with self._turns[log]:
            life = self._seen.get(log)
            if life is None or (life.is_locked and life.looked_at < since):
                life = self._seen[log] = await asyncio.to_thread(self._read, log)
            return life

    def _read(self, log: Path) -> _LogState:
        # read the lock first: a process that has released its lock writes nothing more
        begun, locked = time.monotonic(), is_locked(log)
        if not locked and log not in self._before:
            return _LogState(begun, False, True, {})
        wanted = self._wanted.__contains__ if self._wanted else None
        try:
            answers = read_resume_state(log, Resume(wanted=wanted)).answers
        except (LogError, OSError) as error:
            if not locked:  # the log's answers are lost, so the requests are computed again
                operator_log.warning("an earlier log cannot be read", log=log.name, reason=str(error))
            return _LogState(begun, locked, False, {})
        kept = {name: each for name, each in answers.items() if name in self._wanted or not each.reason}
        return _LogState(begun, locked, True, kept)
