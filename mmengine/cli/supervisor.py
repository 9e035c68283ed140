"""`mmengine run` with a log runs in a process of its own; this one starts it again when it breaks down.

What brings a process down and comes again: a step that hung (it says so in the log, and exits with
HANG_EXIT), or a signal that no user sends, as a crash of native code does. Then the log is told, the next
process isolates the requests that were in the step, and the batch goes on without the one to blame.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from types import FrameType

from mmengine.errors import MMEngineError

COMMAND = (sys.executable, "-m", "mmengine.cli.main")
CHILD = "MMENGINE_SUPERVISED_BY"  # environment: the process id of the supervisor
CAUSE = "MMENGINE_ENDED_BY"  # environment: how the process before ended
HANG_EXIT = 75
MAX_RESTARTS = 32  # in a row, without an answer in between
FATAL = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)


def is_supervised() -> bool:
    return CHILD in os.environ


def ended_by() -> str:
    """How the supervised process before this one ended; empty where that was nobody's doing."""
    return os.environ.get(CAUSE, "")


def end_with_supervisor() -> None:
    """Let the kernel kill this process when its supervisor is gone, so that the log becomes free."""
    import ctypes  # lazy: only a supervised process needs it

    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != int(os.environ[CHILD]):  # it was gone before that
        os._exit(1)


def supervise(arguments: list[str], progress: Callable[[], int]) -> int:
    """Run `mmengine` with `arguments` until it ends by itself; gives its exit code. `progress` grows with
    each answer. Raises MMEngineError when it breaks down again and again without any."""
    environment = {**os.environ, CHILD: str(os.getpid())}
    restarts, before = 0, progress()
    while True:
        code = _run(arguments, environment)
        cause = _cause(code)
        if cause is None:
            return code if code >= 0 else 128 - code
        now = progress()
        restarts, before = (restarts + 1 if now == before else 1), now
        if restarts > MAX_RESTARTS:
            raise MMEngineError(f"given up after {MAX_RESTARTS} restarts without a new answer: {cause}")
        print(f"mmengine: {cause}; starting again", file=sys.stderr)
        environment[CAUSE] = cause


def _cause(code: int) -> str | None:
    """Why to start again; None for an end that was meant."""
    if code == HANG_EXIT:
        return "a step hung"
    if -code in FATAL:
        return f"the process died of {signal.Signals(-code).name}"
    return None


def _run(arguments: list[str], environment: dict[str, str]) -> int:
    process = subprocess.Popen([*COMMAND, *arguments], env=environment)

    def forward(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    # Ctrl-C reaches the whole foreground group; a signal to this process alone is passed on.
    before = {signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN)}
    before[signal.SIGTERM] = signal.signal(signal.SIGTERM, forward)
    try:
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
