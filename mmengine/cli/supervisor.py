"""`mmengine run` with a log runs in a process of its own; this one starts it again when it breaks down.

What brings a process down and comes again: a step that hung (it says so in the log, and exits with
HANG_EXIT), or a signal that no user sends, as a crash of native code does. Then the log is told, the next
process isolates the requests that were in the step, and the batch goes on without the one to blame. What was
killed for memory would be again: it is said, and the user starts it again with less to hold.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
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


class Ended(NamedTuple):
    """How a process ended: its exit code, what faulthandler said of a crash, and the most memory that it
    held, in bytes."""

    code: int
    trace: str
    peak_bytes: int


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
        code, trace, peak = _run(arguments, {**os.environ, CHILD: str(os.getpid()), CAUSE: cause})
        if code == -signal.SIGKILL:
            what = how_killed(kills, num_memory_kills(), peak)
            print(f"mmengine: {what}. {GOES_ON}", file=sys.stderr)
        if code != HANG_EXIT and -code not in FATAL:
            return code if code >= 0 else 128 - code
        now = progress()
        restarts, before = (restarts + 1 if now == before else 1), now
        in_media = _crashed_in_media(trace)
        what = "a step hung" if code == HANG_EXIT else f"the process died of {signal.Signals(-code).name}"
        what += " while it read an image or a video" if in_media else ""
        if restarts > (MAX_MEDIA_RESTARTS if in_media else MAX_RESTARTS):
            raise MMEngineError(f"given up after {restarts - 1} restarts without a new answer: {what}")
        print(f"mmengine: {what}; starting again", file=sys.stderr)
        cause = "" if in_media else what  # no step is to blame for a crash in a decoder


def _crashed_in_media(trace: str) -> bool:
    """Whether native code crashed on a thread that prepared a prompt, by faulthandler's words."""
    _, _, crashed = trace.partition("Current thread")
    return "/serve/prompts.py" in crashed.partition("\n\n")[0]


def _run(arguments: list[str], environment: dict[str, str]) -> Ended:
    with tempfile.NamedTemporaryFile("r", prefix="mmengine-crash-", errors="replace") as trace:
        process = subprocess.Popen([*COMMAND, *arguments], env={**environment, TRACE: trace.name})
        code, peak_bytes = _wait(process)
        return Ended(code, trace.read(), peak_bytes)


def _wait(process: subprocess.Popen) -> tuple[int, int]:
    """The exit code, and the most memory that the process held, in bytes."""

    def forward(number: int, frame: FrameType | None) -> None:
        os.kill(process.pid, number)  # its id is its own until wait4 returns

    # Ctrl-C reaches the whole foreground group; a signal to this process alone is passed on.
    before = {signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN)}
    before[signal.SIGTERM] = signal.signal(signal.SIGTERM, forward)
    try:
        _, status, usage = os.wait4(process.pid, 0)  # unlike wait, it says what the process used
        process.returncode = os.waitstatus_to_exitcode(status)
        return process.returncode, usage.ru_maxrss * MAX_RSS_UNIT
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
