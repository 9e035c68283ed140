"""Logs of replicas, one for each life of one: who has a request, and what was computed of it.

A log whose lock is free was written by a process that is no more: what stands in it is all that it did. Where
the lock is held, its process may compute what the log has open, and nobody else does before it is over there.
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

FIRST_LOOK_S, LONGEST_PAUSE_S = 0.05, 2.0  # between two looks at a log that somebody writes
SLACK_S = 600.0  # by which clocks of machines, and a log and what was kept behind it, may lie apart


class _LogState(NamedTuple):
    """A log as it was. `looked_at`: monotonic. `is_known`: whether it could be read. `answers`: those that
    are open in it, or wanted, by core id."""

    looked_at: float
    is_locked: bool
    is_known: bool
    answers: dict[str, ResumedAnswer]

    def num_tokens(self, core_ids: Collection[str]) -> int:
        """Of their answers, as far as they are here."""
        return sum(len(self.answers[name].token_ids) for name in core_ids if name in self.answers)

    def has_open(self, core_ids: Collection[str]) -> bool:
        """Whether a process that lives may compute one of these."""
        if not self.is_locked:
            return False
        found = (self.answers.get(core_id) for core_id in core_ids)
        return not self.is_known or any(each is not None and not each.reason for each in found)


class ReplicaLogs:
    """`root`: the folder of all logs, each by its replica's name. `wanted`: core ids of requests that were
    begun before, since `since` (Unix time). Who waits for a replica that gets no further is heard of each
    `patience_s`, and waits on. Belongs to an event loop."""

    def __init__(
        self, root: Path, wanted: Collection[str] = (), since: float = 0.0, patience_s: float = 120.0
    ):
        self._root, self._wanted, self._since = root, frozenset(wanted), since
        self._patience_s = patience_s
        self._before = list(self._logs_before()) if wanted else []
        self._seen: dict[Path, _LogState] = {}
        self._turns: defaultdict[Path, asyncio.Lock] = defaultdict(asyncio.Lock)

    def _logs_before(self) -> Iterator[Path]:
        """Logs that may have what is wanted; one whose files cannot be looked at may, too."""
        for log in sorted(self._root.iterdir()):
            try:
                written = [path.stat().st_mtime for path in segment_paths(log)] if log.is_dir() else []
            except (LogError, OSError):
                yield log
                continue
            if written and max(written) >= self._since - SLACK_S:
                yield log

    async def released(self, replica: str, core_ids: Collection[str]) -> None:
        """Wait until nobody who lives has one of these in the log of a replica."""
        await self._settled(self._root / replica, core_ids)

    async def heard(self, core_ids: Collection[str]) -> list[dict[str, ResumedAnswer]]:
        """What each log of before says of these, by core id, once nobody who lives has one of them."""
        found = [await self._settled(log, core_ids) for log in self._before]
        return [{name: life.answers[name] for name in core_ids if name in life.answers} for life in found]

    async def _settled(self, log: Path, core_ids: Collection[str]) -> _LogState:
        pause, told, news_at = FIRST_LOOK_S, -1, time.monotonic()
        while (life := await self._look(log, time.monotonic())).has_open(core_ids):
            if (count := life.num_tokens(core_ids)) != told:
                told, news_at = count, time.monotonic()
            elif time.monotonic() - news_at > self._patience_s:
                operator_log.warning("a replica lives and gets no further; end it", replica=log.name)
                news_at = time.monotonic()
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
        return life

    async def _look(self, log: Path, since: float) -> _LogState:
        """As it was then or later; all who ask meanwhile have one look together."""
        async with self._turns[log]:
            life = self._seen.get(log)
            if life is None or (life.is_locked and life.looked_at < since):
                life = self._seen[log] = await asyncio.to_thread(self._read, log)
            return life

    def _read(self, log: Path) -> _LogState:
        begun, locked = time.monotonic(), is_locked(log)  # first: who is dead by then has written all
        if not locked and log not in self._before:
            return _LogState(begun, False, True, {})
        wanted = self._wanted.__contains__ if self._wanted else None
        try:
            answers = read_resume_state(log, Resume(wanted=wanted)).answers
        except (LogError, OSError) as error:
            if not locked:  # then it is computed again
                operator_log.warning("a log of before cannot be read", log=log.name, reason=str(error))
            return _LogState(begun, locked, False, {})
        kept = {name: each for name, each in answers.items() if name in self._wanted or not each.reason}
        return _LogState(begun, locked, True, kept)
