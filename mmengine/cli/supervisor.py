"""The supervisor of `mmengine run`, and functions that the server's supervisor shares.

The supervisor restarts a process after a hung step (exit code HANG_EXIT) or a crash signal such as SIGSEGV.
The next process isolates the requests in the failed step, so that all other requests continue. After an
out-of-memory kill `mmengine run` ends with an error, because a restart would be killed again.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import NamedTuple

from mmengine.cli.memory_kills import how_killed, num_memory_kills
from mmengine.errors import MMEngineError

COMMAND = (sys.executable, "-m", "mmengine.cli.main")
CHILD = "MMENGINE_SUPERVISED_BY"  # Environment variable for the process id of the supervisor.
CAUSE = "MMENGINE_ENDED_BY"  # Environment variable that says how the previous process ended.
TRACE = "MMENGINE_CRASH_FILE"  # Environment variable for the path of the file for native crash traces.
HANG_EXIT = 75
INTERRUPTED = 130  # Exit code after a signal that stops the command.
GOES_ON = (
    "All accepted requests are in the log: the same command continues with them. If memory is short, free "
    "some first, or lower media_workers or media_cache_bytes"
)
MAX_RESTARTS = 32  # Maximum number of consecutive restarts without a new answer.
MAX_MEDIA_RESTARTS = 2  # Maximum number of consecutive restarts after crashes in media decoders.
# getrusage's ru_maxrss is in units of this many bytes.
MAX_RSS_UNIT = 1 if sys.platform == "darwin" else 1024
FATAL = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)


class CannotStart(MMEngineError):
    """The system lacks resources for another process or for its crash file."""


class Ended(NamedTuple):
    """How a process ended: its exit code (negative for a signal), the crash trace of faulthandler, and the
    peak memory in bytes.
    """

    code: int
    trace: str
    peak_bytes: int

    @property
    def in_media(self) -> bool:
        """Whether native code crashed in a thread that prepared a prompt, according to the crash trace."""
        _, _, crashed = self.trace.partition("Current thread")
        return "/serve/prompt/" in crashed.partition("\n\n")[0]

    @property
    def exit_code(self) -> int:
        """The exit code as a shell reports it: 128 plus the signal's number for a signal."""
        return self.code if self.code >= 0 else 128 - self.code

    @property
    def what(self) -> str:
        """A description of how the process failed."""
        if self.code == HANG_EXIT:
            return "a step hung"
        if self.code >= 0:
            return f"the process ended with exit code {self.code}"
        what = f"the process died from {signal.Signals(-self.code).name}"
        return what + (" while it read an image or a video" if self.in_media else "")


def is_supervised() -> bool:
    return CHILD in os.environ


def ended_by() -> str:
    """Return how the previous process ended, or "" if no step is to blame."""
    return os.environ.get(CAUSE, "")


def obey_supervisor() -> None:
    """Let the kernel kill this process if its supervisor dies, so that the log is unlocked. Write native
    crash traces to the supervisor's file.
    """
    import ctypes  # Lazy: only a supervised process needs these modules
    import faulthandler

    faulthandler.enable(os.open(os.environ[TRACE], os.O_WRONLY))
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != int(os.environ[CHILD]):  # The supervisor died before the call of prctl.
        os._exit(1)


def supervise(arguments: list[str], progress: Callable[[], int]) -> int:
    """Run `mmengine` with `arguments`, restart it after failures, and return the exit code.

    `progress`: returns a number that grows with each answer. Raises MMEngineError if the process fails
    repeatedly without a new answer.
    """
    restarts, before, cause = 0, progress(), ""
    while True:
        kills = num_memory_kills()
        with started(arguments, cause) as process:
            ended = _wait(process)
        if ended.code == -signal.SIGKILL:
            what = how_killed(kills, num_memory_kills(), ended.peak_bytes)
            print(f"mmengine: {what}. {GOES_ON}", file=sys.stderr)
        if ended.code != HANG_EXIT and -ended.code not in FATAL:
            return ended.exit_code
        now = progress()
        restarts, before = (restarts + 1 if now == before else 1), now
        if restarts > (MAX_MEDIA_RESTARTS if ended.in_media else MAX_RESTARTS):
            raise MMEngineError(f"given up after {restarts - 1} restarts without a new answer: {ended.what}")
        print(f"mmengine: {ended.what}; starting again", file=sys.stderr)
        cause = "" if ended.in_media else ended.what  # No step is to blame for a crash in a media decoder.


class Process(NamedTuple):
    """A running process. `trace`: path of the file for its native crash trace."""

    popen: subprocess.Popen
    trace: str

    def ended(self, status: int, peak_rss: int) -> Ended:
        """Return how the process ended. `status` and `peak_rss` come from wait4; `peak_rss` is in units of
        MAX_RSS_UNIT.
        """
        self.popen.returncode = os.waitstatus_to_exitcode(status)
        with open(self.trace, errors="replace") as trace:
            return Ended(self.popen.returncode, trace.read(), peak_rss * MAX_RSS_UNIT)


@contextmanager
def started(
    arguments: Sequence[str],
    cause: str,
    environment: Mapping[str, str] | None = None,
    fds: Sequence[int] = (),
    own_group: bool = False,
) -> Iterator[Process]:
    """Start `mmengine` with `arguments` as a child process. The caller must wait inside the context until the
    child has ended.

    `cause`: how the previous process ended. `environment`: additional variables. `fds`: descriptors that the
    child inherits. `own_group`: whether the child gets its own process group, so that signals from a terminal
    reach only the parent. Raises CannotStart.
    """
    with ExitStack() as opened:
        try:
            trace = opened.enter_context(tempfile.NamedTemporaryFile(prefix="mmengine-crash-"))
            ours = {CHILD: str(os.getpid()), CAUSE: cause, TRACE: trace.name}
            popen = subprocess.Popen(
                [*COMMAND, *arguments],
                env={**os.environ, **(environment or {}), **ours},
                pass_fds=fds,
                process_group=0 if own_group else None,
            )
        except OSError as error:
            raise CannotStart(f"no process can be started: {error.strerror or error}") from None
        yield Process(popen, trace.name)


def _wait(process: Process) -> Ended:
    def forward(number: int, frame: FrameType | None) -> None:
        os.kill(process.popen.pid, number)  # The process id cannot be reused until wait4 returns.

    # Ctrl-C reaches the whole foreground group, so SIGINT is ignored. SIGTERM reaches only this process.
    before = {signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN)}
    before[signal.SIGTERM] = signal.signal(signal.SIGTERM, forward)
    try:
        _, status, usage = os.wait4(process.popen.pid, 0)  # Unlike wait, wait4 returns resource usage.
        return process.ended(status, usage.ru_maxrss)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
