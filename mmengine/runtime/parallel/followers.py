"""Starts and supervises the other ranks' processes. This module is used in rank 0."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from mmengine.errors import ConfigError, ExecutorFailed, ExecutorLost
from mmengine.runtime.parallel.channel import Channel, ChannelClosed, MessageKind
from mmengine.runtime.parallel.job import Job, encode

_COMMAND = (sys.executable, "-m", "mmengine.runtime.parallel.follower")
POLL_S = 0.2
LAST_WORDS_S = 0.5  # maximum time to wait for a rank's last message after an exchange has failed
END_S = 2.0


class Followers:
    """The processes of all ranks except rank 0. They end when their channel closes or when this process ends.
    A rank is lost if it does not read a message within `timeout_s`.
    """

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
                # The child must find the same modules as this process.
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            )
        except OSError as error:
            ours.close()
            raise ConfigError(f"the process for a rank could not be started: {error.strerror}") from None
        finally:
            theirs.close()
        self._channels.append(Channel(ours, self._timeout_s))
        self._processes.append(process)

    @property
    def store(self) -> Path:
        """The file through which the ranks connect to each other."""
        return Path(self._folder.name) / "store"

    def assign(self, jobs: list[Job]) -> None:
        for channel, job in zip(self._channels, jobs, strict=True):
            with suppress(ChannelClosed):  # `await_ready` will report the reason
                channel.send(MessageKind.JOB, encode(job))

    def start(self, snapshot: bytes) -> None:
        """Send a snapshot with the initial state to the other ranks."""
        for channel in self._channels:
            with suppress(ChannelClosed):
                channel.send(MessageKind.START, snapshot)

    def await_ready(self, timeout_s: float) -> None:
        """Wait for the next READY from each rank. Raises ConfigError if a rank ends, sends an error, or
        exceeds `timeout_s`.
        """
        self._await(MessageKind.READY, timeout_s)

    def agree(self, word: str, timeout_s: float) -> bool:
        """Return whether each rank has sent `word` and `word` is not empty. Sends the result to the ranks.
        Raises the same errors as `await_ready`.
        """
        agreed = {*self._await(MessageKind.WORD, timeout_s), word.encode()} == {word.encode() or None}
        for channel in self._channels:
            with suppress(ChannelClosed):  # the next wait for this rank will report the closed channel
                channel.send(MessageKind.WORD, b"yes" if agreed else b"")
        return agreed

    def _await(self, wanted: MessageKind, timeout_s: float) -> list[bytes]:
        """Return the content of each rank's next message. The messages must be of the kind `wanted`."""
        deadline, bodies = time.monotonic() + timeout_s, []
        for rank, channel in enumerate(self._channels, 1):
            message = None
            while message is None:
                if time.monotonic() > deadline:
                    raise ConfigError(f"rank {rank} was not ready within {timeout_s:g} seconds")
                try:
                    message = channel.receive(POLL_S)
                except ChannelClosed:
                    raise ConfigError(f"rank {rank} {self._ended(rank)} before it was ready") from None
            kind, body = message
            if kind is not wanted:
                raise ConfigError(f"rank {rank} cannot start: {body.decode(errors='replace')}")
            bodies.append(body)
        return bodies

    def step(self, frames: bytes) -> None:
        """Send `frames` (log records) to all ranks, which then compute the step. Raises ExecutorLost if a
        rank is lost. Rank 0 must compute the step even if another rank failed, so errors that ranks report
        are raised later, by `check`.
        """
        if not self._lost:
            for channel in self._channels:
                try:
                    channel.send(MessageKind.STEP, frames)
                except ChannelClosed as error:
                    self.mark_lost(str(error))
                    break
        if self._lost:
            raise ExecutorLost(self._lost)

    def check(self) -> None:
        """Raise ExecutorFailed if a rank has reported an error in a step, or ExecutorLost if a rank is
        lost.
        """
        reports = self._read_reports(0.0)
        if self._lost:
            raise ExecutorLost(self._lost)
        if reports:
            raise ExecutorFailed("; ".join(reports))

    def mark_lost(self, reason: str) -> None:
        """Make `check` raise ExecutorLost from now on, because the ranks' states may differ."""
        reports = self._read_reports(LAST_WORDS_S)
        out_of_step = f"the ranks lost contact ({reason}); start the engine again"
        self._lost = self._lost or "; ".join([*reports, out_of_step])

    def _read_reports(self, wait_s: float) -> list[str]:
        """Return the errors that ranks have reported. If a rank has sent ENDS or closed its channel, all
        ranks are lost. `wait_s`: maximum time to wait for each message.
        """
        reports: list[str] = []
        if self._lost:
            return reports
        gone = 0
        for rank, channel in enumerate(self._channels, 1):
            ends = False
            try:
                while not ends and (message := channel.receive(wait_s)) is not None:
                    kind, body = message
                    reports.append(f"rank {rank}: {body.decode(errors='replace')}")
                    ends = kind is MessageKind.ENDS
            except ChannelClosed:
                ends = True
            if ends:
                gone = gone or rank
        if gone:
            end = f"rank {gone} of {len(self._channels) + 1} {self._ended(gone)}"
            self._lost = "; ".join([*reports, end, "restart the engine, which continues its log"])
        return reports

    def _ended(self, rank: int) -> str:
        try:
            code = self._processes[rank - 1].wait(END_S)
        except subprocess.TimeoutExpired:
            return "stopped"
        return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"

    def close(self) -> None:
        """End all processes. A process that does not end within END_S is killed."""
        for channel in self._channels:
            channel.close()
        for process in self._processes:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()
