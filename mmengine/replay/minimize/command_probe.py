"""Runs a user's command on a log to find out whether the log fails. An mmengine command runs in this process,
and any other command in a new process.

Running mmengine in this process saves minutes, because its start takes almost a second and minimizing runs
the command several hundred times.
"""

import io
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from math import inf
from pathlib import Path
from types import FrameType

from mmengine.errors import LogError
from mmengine.replay.minimize.deadline import Deadline
from mmengine.replay.minimize.failures import KINDS, Failure, write_log
from mmengine.replay.minimize.probe import TestParts
from mmengine.replay.rerun.script import Script

Main = Callable[[list[str]], int]
PLACE = "{}"  # The placeholder for the log's folder in a command.
OWN_VERBS = ("verify", "fsck", "show", "why")  # mmengine commands that read a log without changing it.

_BODY = """    command = [part.replace("{{}}", str(log)) for part in {command!r}]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != {code}, done.stdout + done.stderr"""


class CommandProbe:
    """A probe that counts a log as failing if the command's exit code is not 0.

    A failure's signature consists of the exit code and a printed line without its numbers: `verify`'s
    verdict, or else the last line. When the deadline passes, the command is killed. `main` runs `mmengine`
    with the given arguments in this process and returns the exit code. If `main` is None, every command runs
    in a new process.
    """

    def __init__(self, text: str, deadline: Deadline | None = None, main: Main | None = None):
        try:
            self.parts = shlex.split(text)
        except ValueError as error:
            raise LogError(f"the command {text!r} cannot be parsed: {error}") from None
        self._deadline = deadline or Deadline()
        self.code = 0
        if not self.parts or not any(PLACE in part for part in self.parts):
            raise LogError(
                f"{text!r} is neither a kind of failure ({', '.join(KINDS)}) nor a command with the "
                f"placeholder {PLACE} for the log"
            )
        self._main = main if _is_own(self.parts) else None

    def of_script(self, script: Script, max_steps: int) -> Failure | None:
        with tempfile.TemporaryDirectory() as folder:
            self.write(script, Path(folder) / "log", max_steps)
            return self.of_log(Path(folder) / "log")

    def check_first(self, failure: Failure) -> None:
        """Accept any failure, because a command has only one kind of failure."""

    def write(self, script: Script, folder: Path, max_steps: int = 2**62) -> None:
        write_log(script, "any", folder, max_steps, self._deadline)

    def of_log(self, folder: Path) -> Failure | None:
        self._deadline.check()
        command = [part.replace(PLACE, str(folder)) for part in self.parts]
        code, said = self._as_process(command) if self._main is None else self._here(self._main, command[1:])
        if code == 0:
            return None
        self.code = code
        return Failure(f"exit code {code}", _telling_line(said).replace(str(folder), "LOG")[:300], -1)

    def test(self, failure: Failure) -> TestParts:
        body = _BODY.format(command=self.parts, code=self.code)
        return TestParts("command", "A command fails on this log.", "import subprocess\n", body)

    def _as_process(self, command: list[str]) -> tuple[int, str]:
        left = self._deadline.left()
        pipe = subprocess.PIPE
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=pipe,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            raise LogError(f"{command[0]} cannot be run: {error.strerror}") from None
        try:
            said, _ = process.communicate(timeout=None if left == inf else max(left, 0.01))
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)  # Kills the process and all its child processes.
            process.communicate()
            if isinstance(error, subprocess.TimeoutExpired):
                raise self._deadline.over() from None
            raise
        return process.returncode, said

    def _here(self, main: Main, arguments: list[str]) -> tuple[int, str]:
        """Run the command in this process, and return the exit code and the output."""
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err), _alarm(self._deadline):
            code = main(arguments)
        self._deadline.check()  # The command may have caught the alarm's exception.
        return code, out.getvalue() + err.getvalue()


def _telling_line(said: str) -> str:
    """Return `verify`'s verdict line if the output has such a line, else the last line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()] or [""]
    return next((line for line in lines if line.startswith(("DIVERGED", "BROKEN"))), lines[-1])


def _is_own(parts: list[str]) -> bool:
    """Return whether the command is an mmengine command that only reads a log."""
    if len(parts) < 3 or parts[1] != "log" or parts[2] not in OWN_VERBS:
        return False
    if {"--repair", "--follow", "-f"} & {*parts}:
        return False
    program, here = shutil.which(parts[0]), shutil.which(sys.argv[0])
    return program is not None and here is not None and Path(program).resolve() == Path(here).resolve()


@contextmanager
def _alarm(deadline: Deadline) -> Iterator[None]:
    """Raise OutOfTime in this block, from a signal handler, when the deadline passes."""
    left = deadline.left()
    if left == inf or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(number: int, frame: FrameType | None) -> None:
        deadline.check()

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(left, 0) + 0.01, 0.1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
