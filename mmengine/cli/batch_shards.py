"""`mmengine run --batch --shards N`: a batch that many processes answer over one folder, on as many machines.

Each shard has a log of its own, which one process writes: the lock on it says whether somebody is at work
there. Who is done with its own shard takes up those that are unfinished and that nobody holds, with all that
their logs know, half answers included. Who sees that all are answered joins the answers into one file.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

from mmengine.cli.batch import INTERRUPTED
from mmengine.errors import InvalidRequest, LogError
from mmengine.events.files import sync_data
from mmengine.events.lock import is_locked, lock
from mmengine.serve.batch_progress import RequestIndex
from mmengine.serve.batchfile import Shard

LOOK_AGAIN_S = 1.0  # whether a shard that somebody holds was finished, or abandoned
_CHUNK = 2**20
RunShard = Callable[[Path, Path, Shard], int]  # of its answers and its log: the exit code


class Shards:
    """`own`: that this process begins with. Raises InvalidRequest, OSError."""

    def __init__(self, requests: Path, out: Path, log: Path, own: Shard):
        if own.index >= own.count:
            raise InvalidRequest(f"--shard {own.index} is none of --shards {own.count}; they count from 0")
        self._out, self._log, self._own = out, log, own
        self._num_lines = RequestIndex(requests).num_in_file
        self._console = Console(stderr=True)
        log.mkdir(parents=True, exist_ok=True)

    def run(self, run_shard: RunShard) -> int:
        """Until all shards are answered, by whomever: 0; 130 when a signal ended it before."""
        while unfinished := [shard for shard in self._in_order() if not self._is_answered(shard)]:
            free = next((shard for shard in unfinished if not is_locked(self.log_of(shard))), None)
            if free is None:
                time.sleep(LOOK_AGAIN_S)
                continue
            if free != self._own:
                self._say(f"taking up shard {free.index}, which nobody answers")
            try:
                code = run_shard(answers_of(self._out, free), self.log_of(free), free)
            except LogError as error:
                if not is_locked(self.log_of(free)):
                    raise
                self._say(f"somebody else has taken shard {free.index} up: {error}")
                time.sleep(LOOK_AGAIN_S)
                continue
            if code == INTERRUPTED:
                return code
        self._join()
        return 0

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)

    def _in_order(self) -> Iterator[Shard]:
        count = self._own.count
        return (Shard((self._own.index + step) % count, count) for step in range(count))

    def log_of(self, shard: Shard) -> Path:
        return self._log / f"shard-{shard.index}-of-{shard.count}"

    def _is_answered(self, shard: Shard) -> bool:
        """By the lines of its answers: each request of it has one in the end."""
        try:
            with answers_of(self._out, shard).open("rb") as file:
                found = sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(_CHUNK), b""))
        except FileNotFoundError:
            found = 0
        return found >= shard.num_of(self._num_lines)

    def _join(self) -> None:
        """One file of all answers, once: the others wait until it is there."""
        held = None
        while held is None:
            try:
                held = lock(self._log)
            except LogError:
                time.sleep(LOOK_AGAIN_S)
        try:
            parts = [answers_of(self._out, shard) for shard in sorted(self._in_order())]
            size = sum(part.stat().st_size for part in parts)
            if self._out.exists() and self._out.stat().st_size == size:
                return
            aside = self._out.with_name(f"{self._out.name}.part")
            with aside.open("wb") as file:
                for part in parts:
                    with part.open("rb") as source:
                        shutil.copyfileobj(source, file, _CHUNK)
                file.flush()
                sync_data(file.fileno())
            aside.replace(self._out)
            self._say(f"all {self._num_lines} lines have their answers in {self._out}")
        finally:
            os.close(held)


def answers_of(out: Path, shard: Shard) -> Path:
    return out.with_name(f"{out.name}.shard-{shard.index}-of-{shard.count}")


def num_answer_bytes(out: Path, count: int) -> int:
    """That all shards have given so far."""
    parts = (answers_of(out, Shard(index, count)) for index in range(count))
    return sum(part.stat().st_size for part in parts if part.exists())
