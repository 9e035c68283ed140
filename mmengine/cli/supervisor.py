"""A process that answers, below one that watches over it: what both need, and `mmengine run`'s supervisor.

What brings a process down and comes again: a step that hung (it says so in the log, and exits with
HANG_EXIT), or a signal that no user sends, as a crash of native code does. Then the log is told, the next
process isolates the requests that were in the step, and the others go on without the one to blame. What
was killed for memory in `mmengine run` would be again: it is said, and the user starts it again with less to
hold.
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
CHILD = "MMENGINE_SUPERVISED_BY"  # environment: the process id of the supervisor
CAUSE = "MMENGINE_ENDED_BY"  # environment: how the process before ended
TRACE = "MMENGINE_CRASH_FILE"  # environment: where to say in what native code crashed
HANG_EXIT = 75
GOES_ON = (
    "All that it accepted is in the log: the same command goes on from there. If memory is short, make room "
    "first, or set media_workers or media_cache_bytes lower"
)
MAX_RESTARTS = 32  # restarts in a row, without an answer in between
MAX_MEDIA_RESTARTS = 2  # in a row, where the same file crashes its decoder each time
MAX_RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # of getrusage, in bytes
FATAL = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)


class CannotStart(MMEngineError):
    """The system has no room for another process, or for the file where it would say of its crash."""


class Ended(NamedTuple):
    """How a process ended: its exit code, what faulthandler said of a crash, and the most memory that it
    held, in bytes."""

    code: int
    trace: str
    peak_bytes: int

    @property
    def in_media(self) -> bool:
        """Whether native code crashed on a thread that prepared a prompt, by faulthandler's words."""
        _, _, crashed = self.trace.partition("Current thread")
        return "/serve/prompts.py" in crashed.partition("\n\n")[0]

    @property
    def exit_code(self) -> int:
        """As a shell has it."""
        return self.code if self.code >= 0 else 128 - self.code

    @property
    def what(self) -> str:
        """In words, for one that broke down."""
        if self.code == HANG_EXIT:
            return "a step hung"
        if self.code >= 0:
            return f"the process ended with exit code {self.code}"
        what = f"the process died of {signal.Signals(-self.code).name}"
        return what + (" while it read an image or a video" if self.in_media else "")


def is_supervised() -> bool:
    return CHILD in os.environ


def ended_by() -> str:
    """How the supervised process before this one ended; empty where no step was to blame."""
    return os.environ.get(CAUSE, "")


def obey_supervisor() -> None:
    """Let the kernel kill this process when its supervisor is gone, so that the log becomes free, and tell
    the supervisor where native code crashes."""
    import ctypes  # lazy: only a supervised process needs them
    import faulthandler

    faulthandler.enable(os.open(os.environ[TRACE], os.O_WRONLY))
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != int(os.environ[CHILD]):  # the supervisor was gone before that
        os._exit(1)


def supervise(arguments: list[str], progress: Callable[[], int]) -> int:
    """Run `mmengine` with `arguments` until it ends by itself; gives its exit code. `progress` grows with
    each answer. Raises MMEngineError when it breaks down again and again without any."""
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
        cause = "" if ended.in_media else ended.what  # no step is to blame for a crash in a decoder


class Process(NamedTuple):
    """One that runs. `trace`: the file where it says in what native code crashed."""

    popen: subprocess.Popen
    trace: str

    def ended(self, status: int, peak_rss: int) -> Ended:
        """`status` and `peak_rss` as wait4 gives them."""
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
    """`mmengine` with `arguments` in a process of its own, which has ended when this does. `cause`: how the
    one before ended. `fds`: descriptors that it inherits. `own_group`: it hears of signals by this
    process alone, and not of those of a terminal. Raises CannotStart."""
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
        os.kill(process.popen.pid, number)  # its id is its own until wait4 returns

    # Ctrl-C reaches the whole foreground group; a signal to this process alone is passed on.
    before = {signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN)}
    before[signal.SIGTERM] = signal.signal(signal.SIGTERM, forward)
    try:
        _, status, usage = os.wait4(process.popen.pid, 0)  # unlike wait, it says what the process used
        return process.ended(status, usage.ru_maxrss)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
