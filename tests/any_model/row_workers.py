"""Computes the rows of a table in forked processes with limits on time and memory.

A row whose process crashes or exceeds a limit contains the reason.
"""

import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mmengine.errors import in_one_line

# Limit on the CPU time of each process. Wall-clock time would depend on the machine's load.
SECONDS = 420
HANGS = 3600  # Wall-clock seconds after which a row's process is killed, even if it uses no CPU time.
BYTES = 10 * 2**30  # Limit on the address space, most of which torch's libraries take.
Task = Callable[[], dict[str, object]]


@dataclass(frozen=True)
class RunningRow:
    """A process that computes a row and writes it to `file`."""

    name: str
    pid: int
    file: Path
    started: float


def run_rows(
    tasks: Iterable[tuple[str, Task]], workers: int
) -> Iterator[tuple[str, dict[str, object] | str]]:
    """Yield each finished row's name, with its values or the reason for their absence."""
    waiting, running = iter(tasks), []
    with tempfile.TemporaryDirectory() as place:
        while True:
            while len(running) < workers and (task := next(waiting, None)) is not None:
                running.append(_start(*task, Path(place) / f"{len(os.listdir(place))}-{task[0]}"))
            if not running:
                return
            time.sleep(0.1)
            for row in list(running):
                found = _finished(row)
                if found is not None:
                    running.remove(row)
                    yield row.name, found


def _start(name: str, task: Task, file: Path) -> RunningRow:
    file.touch()
    pid = os.fork()
    if pid:
        return RunningRow(name, pid, file, time.monotonic())
    code = 1
    try:
        os.setpgid(0, 0)  # Lets `killpg` kill the row's own subprocesses too.
        with open(os.devnull, "w") as nothing:  # The engine logs, and tests print.
            os.dup2(nothing.fileno(), 1)
        resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, 2 * SECONDS))
        try:
            found: dict[str, object] | str = task()
        except Exception as error:  # The table shows the error.
            traceback.print_exc()
            found = in_one_line(error, 200)
        file.write_text(json.dumps(found))
        code = 0
    finally:
        sys.stdout.flush()
        os._exit(code)


def _finished(row: RunningRow) -> dict[str, object] | str | None:
    """Return a finished row's values or the reason for their absence; None if the row is still running."""
    pid, status = os.waitpid(row.pid, os.WNOHANG)
    if not pid:
        if time.monotonic() - row.started < HANGS:
            return None
        os.killpg(row.pid, signal.SIGKILL)
        os.waitpid(row.pid, 0)
        return f"no result within {HANGS} s"
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGXCPU:
        return f"no result within {SECONDS} s of CPU time"
    text = row.file.read_text()
    return json.loads(text) if code == 0 and text else f"the process ended with code {code}"
