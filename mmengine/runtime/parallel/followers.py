"""The processes of the ranks that follow, as rank 0 sees them."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from mmengine.errors import ConfigError, ExecutorFailed, ExecutorLost
from mmengine.runtime.parallel.channel import Channel, Closed, Kind
from mmengine.runtime.parallel.job import Job, encode

_COMMAND = (sys.executable, "-m", "mmengine.runtime.parallel.follower")
POLL_S = 0.2
LAST_WORDS_S = 0.5  # that a rank's own words are waited for when its part of an exchange is missing
END_S = 2.0


class Followers:
    """One process a rank, from 1 on. They end with their channels, or with this process. One that
    does not read a message within `timeout_s` counts as gone."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="mmengine-ranks-")
        self._channels: list[Channel] = []
        self._processes: list[subprocess.Popen] = []
        self._lost = ""
        self._timeout_s = timeout_s
        try:
            for _ in range(1, size):
                self._spawn()
        except BaseException:
            self.close()
            raise

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            command = [*_COMMAND, str(theirs.fileno())]
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # It finds the same modules as this process, however that was started.
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            )
        except OSError as error:
            ours.close()
            raise ConfigError(f"a process for a rank could not be started: {error.strerror}") from None
        finally:
            theirs.close()
        self._channels.append(Channel(ours, self._timeout_s))
        self._processes.append(process)

    @property
    def store(self) -> Path:
        """A file for the ranks to meet at."""
        return Path(self._folder.name) / "store"

    def assign(self, jobs: list[Job]) -> None:
        for channel, job in zip(self._channels, jobs, strict=True):
            with suppress(Closed):  # `await_ready` says why
                channel.send(Kind.JOB, encode(job))

    def start(self, snapshot: bytes) -> None:
        """Where their folds begin."""
        for channel in self._channels:
            with suppress(Closed):
                channel.send(Kind.START, snapshot)

    def await_ready(self, timeout_s: float) -> None:
        """Wait until each said READY once more. Raises ConfigError with the words of one that did not."""
        self._await(Kind.READY, timeout_s)

    def agree(self, word: str, timeout_s: float) -> bool:
        """Whether each rank says this word now, and none of them nothing, which all are told. Raises
        ConfigError as `await_ready`."""
        agreed = {*self._await(Kind.WORD, timeout_s), word.encode()} == {word.encode() or None}
        for channel in self._channels:
            with suppress(Closed):  # whoever waits for it next says so
                channel.send(Kind.WORD, b"yes" if agreed else b"")
        return agreed

    def _await(self, wanted: Kind, timeout_s: float) -> list[bytes]:
        """The next message of each, which is of this kind."""
        deadline, bodies = time.monotonic() + timeout_s, []
        for rank, channel in enumerate(self._channels, 1):
            message = None
            while message is None:
                if time.monotonic() > deadline:
                    raise ConfigError(f"rank {rank} was not ready within {timeout_s:g} seconds")
                try:
                    message = channel.receive(POLL_S)
                except Closed:
                    raise ConfigError(f"rank {rank} {self._ended(rank)} before it was ready") from None
            kind, body = message
            if kind is not wanted:
                raise ConfigError(f"rank {rank} cannot start: {body.decode(errors='replace')}")
            bodies.append(body)
        return bodies

    def step(self, frames: bytes) -> None:
        """Have all of them fold `frames` and run the step at their end. Raises ExecutorLost when one is
        gone. What they say of steps is for `check`: one may have failed this step already, which rank 0 is to
        take part in all the same."""
        if not self._lost:
            for channel in self._channels:
                try:
                    channel.send(Kind.STEP, frames)
                except Closed as error:
                    self.lose(str(error))
                    break
        if self._lost:
            raise ExecutorLost(self._lost)

    def check(self) -> None:
        """Raise ExecutorFailed with what a rank says of the steps so far, ExecutorLost where one is gone."""
        said = self._hear(0.0)
        if self._lost:
            raise ExecutorLost(self._lost)
        if said:
            raise ExecutorFailed("; ".join(said))

    def lose(self, reason: str) -> None:
        """The ranks are out of step for ever; `check` says so from now on, and which of them is gone."""
        said = self._hear(LAST_WORDS_S)
        out_of_step = f"the ranks lost one another ({reason}); start the engine again"
        self._lost = self._lost or "; ".join([*said, out_of_step])

    def _hear(self, wait_s: float) -> list[str]:
        """What the ranks say of the steps so far. When one ends, or is gone, they are lost, whichever of
        its last words and its end is noticed first. `wait_s`: for words on their way."""
        said: list[str] = []
        if self._lost:
            return said
        gone = 0
        for rank, channel in enumerate(self._channels, 1):
            ends = False
            try:
                while not ends and (message := channel.receive(wait_s)) is not None:
                    kind, body = message
                    said.append(f"rank {rank}: {body.decode(errors='replace')}")
                    ends = kind is Kind.ENDS
            except Closed:
                ends = True
            if ends:
                gone = gone or rank
        if gone:
            end = f"rank {gone} of {len(self._channels) + 1} {self._ended(gone)}"
            self._lost = "; ".join([*said, end, "start the engine again, which goes on with its log"])
        return said

    def _ended(self, rank: int) -> str:
        try:
            code = self._processes[rank - 1].wait(END_S)
        except subprocess.TimeoutExpired:
            return "cannot go on"
        return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"

    def close(self) -> None:
        """Let all of them end; one that does not is killed."""
        for channel in self._channels:
            channel.close()
        for process in self._processes:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()
