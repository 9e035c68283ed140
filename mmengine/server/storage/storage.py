"""Opens and closes all data that the server stores next to its log."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from mmengine.errors import KeepFailed
from mmengine.serve.requests.operator_log import operator_log
from mmengine.server.settings import ServerSettings
from mmengine.server.storage.answer_store import SWEEP_S, AnswerStore
from mmengine.server.storage.batches import Batches
from mmengine.server.storage.database import Database, Fault, no_fault
from mmengine.server.storage.files import FileLimits, Files

FOLDER = "store"  # Name of the folder below the log's folder.


class Storage:
    """The stored answers, files and batches of a server.

    `log`: the log's folder. `has_several_keys`: whether the server has several API keys; each key may then
    use only its share of the bytes for files. `clock`: returns Unix time in seconds. `fault`: see Database.
    Raises ConfigError.
    """

    def __init__(
        self,
        log: Path,
        settings: ServerSettings,
        *,
        has_several_keys: bool = False,
        clock: Callable[[], float] = time.time,
        fault: Fault = no_fault,
    ):
        self.clock = clock
        self._database = Database(log / FOLDER, fault)
        try:
            share = settings.key_share if has_several_keys else 1.0
            limits = FileLimits(
                settings.max_file_bytes, settings.files_bytes, int(settings.files_bytes * share)
            )
            self.answers = AnswerStore(self._database, settings.store_ttl, settings.store_bytes, clock)
            self.batches = Batches(self._database)
            self.files = Files(self._database, limits, self.batches.spared(), clock)
        except BaseException:
            self._database.close()
            raise

    async def watch(self) -> None:
        """Delete expired answers and files every SWEEP_S seconds, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            await self.sweep()

    async def sweep(self) -> None:
        try:
            await self.answers.sweep()
            await self.files.sweep(self.batches.inputs())
        except KeepFailed as error:
            operator_log.warning("expired answers and files were not removed", reason=str(error))

    def close(self) -> None:
        """Close the threads and the database. May be called twice."""
        self.files.close()
        self._database.close()
