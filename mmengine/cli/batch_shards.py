"""`mmengine run --batch --shards N`: answers a batch with many processes, on any number of machines that
share a folder.

Each shard (part of the batch) has its own log, which is locked while a process works on the shard. After its
own shard, a process takes over unfinished, unlocked shards and continues them from their logs. When all
shards are answered, a process joins the answers into a single file. A process reuses an existing log and its
answers only if the log was begun with the current request file.
"""

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from rich.console import Console

from mmengine.cli.batch import check_apart
from mmengine.cli.supervisor import INTERRUPTED
from mmengine.errors import InvalidRequest, LogError, MMEngineError
from mmengine.events.file_system import sync_data
from mmengine.events.lock import is_locked, lock
from mmengine.serve.batch.progress import RequestIndex, answered_in
from mmengine.serve.batch.request_file import Shard

LOOK_AGAIN_S = 1.0  # Seconds between two checks of other processes' shards.
_CHUNK = 2**20
RunShard = Callable[[Path, Path, Shard], int]  # Takes a shard's answer file and log; returns the exit code.


class Shards:
    """The shards of a batch. This process starts with the shard `own`. Raises InvalidRequest and OSError."""

    def __init__(self, requests: Path, out: Path, log: Path, own: Shard):
        if own.index >= own.count:
            raise InvalidRequest(
                f"--shard {own.index} is out of range; with --shards {own.count} it is 0 to {own.count - 1}"
            )
        self._out, self._log, self._own = out, log, own
        self._index = RequestIndex(requests)
        check_apart(requests, out)
        self._answered: set[Shard] = set()
        self._console = Console(stderr=True)
        log.mkdir(parents=True, exist_ok=True)

    def run(self, run_shard: RunShard) -> int:
        """Run until all processes together have answered all shards. Return 0, or 130 after a signal.

        Raises LogError or InvalidRequest if an existing log or answer file belongs to another request file.
        """
        while unfinished := [shard for shard in self._in_order() if not self._is_answered(shard)]:
            free = next((shard for shard in unfinished if not is_locked(self.log_of(shard))), None)
            if free is None:
                time.sleep(LOOK_AGAIN_S)
                continue
            if free != self._own:
                self._say(f"taking over shard {free.index}, which has no process")
            try:
                code = run_shard(answers_of(self._out, free), self.log_of(free), free)
            except LogError as error:
                if not is_locked(self.log_of(free)):
                    raise
                self._say(f"another process has taken over shard {free.index}: {error}")
                time.sleep(LOOK_AGAIN_S)
                continue
            if code == INTERRUPTED:
                return code
        self._join()
        return 0

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)

    def _in_order(self) -> Iterator[Shard]:
        """Yield all non-empty shards, starting with this process's own shard."""
        count = self._own.count
        shards = (Shard((self._own.index + step) % count, count) for step in range(count))
        return (shard for shard in shards if shard.num_of(len(self._index)))

    def log_of(self, shard: Shard) -> Path:
        return self._log / f"shard-{shard.index}-of-{shard.count}"

    def _is_answered(self, shard: Shard) -> bool:
        """Whether the shard is answered and no process writes to it. An answered shard stays answered, so the
        result True is cached.
        """
        log = self.log_of(shard)
        if shard in self._answered:
            return True
        if is_locked(log):
            return False
        index = self._index.of(shard)
        try:
            is_begun = index.is_begun(log)
            answered = answered_in(answers_of(self._out, shard), index) if is_begun else set()
        except MMEngineError:
            if is_locked(log):  # Another process has just started and will replace the old files.
                return False
            raise
        if len(answered) == len(index) and not is_locked(log):
            self._answered.add(shard)
        return shard in self._answered

    def _join(self) -> None:
        """Join all answers into a single file, while other processes wait."""
        held = None
        while held is None:
            try:
                held = lock(self._log)
            except LogError:
                time.sleep(LOOK_AGAIN_S)
        try:
            parts = [answers_of(self._out, shard) for shard in sorted(self._in_order())]
            if self._is_joined(parts):
                return
            aside = self._out.with_name(f"{self._out.name}.part")
            with aside.open("wb") as file:
                for chunk in _chunks(parts):
                    file.write(chunk)
                file.flush()
                sync_data(file.fileno())
            aside.replace(self._out)
            self._say(f"all {len(self._index)} lines have their answers in {self._out}")
        finally:
            os.close(held)

    def _is_joined(self, parts: list[Path]) -> bool:
        """Whether the output file already contains the joined answers. The contents are compared, because
        answers to another request file may have the same size.
        """
        if not self._out.exists() or self._out.stat().st_size != sum(part.stat().st_size for part in parts):
            return False
        with self._out.open("rb") as file:
            return all(file.read(len(chunk)) == chunk for chunk in _chunks(parts))


def _chunks(parts: list[Path]) -> Iterator[bytes]:
    for part in parts:
        with part.open("rb") as file:
            yield from iter(partial(file.read, _CHUNK), b"")


def answers_of(out: Path, shard: Shard) -> Path:
    return out.with_name(f"{out.name}.shard-{shard.index}-of-{shard.count}")


def num_answer_bytes(out: Path, count: int) -> int:
    """Return how many bytes of answers all shards together have written so far."""
    parts = (answers_of(out, Shard(index, count)) for index in range(count))
    return sum(part.stat().st_size for part in parts if part.exists())
