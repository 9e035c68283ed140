"""Separate processes, for tests that kill them or measure their memory."""

import logging
import os
import runpy
import signal
import sys
import tempfile
import traceback
from subprocess import CompletedProcess

# A prefix for a command whose peak memory is measured. On Linux, the peak includes the memory of the forking
# process, which is small for a shell but may be gigabytes for the test process.
WITH_OWN_PEAK = ("sh", "-c", '"$@"; exit $?', "sh")


def exit_code_of(run):
    """Call `run` in a fork of this process, and return its exit code. If a signal killed the fork, the code
    is the negative signal number. The fork's error output is discarded.
    """
    pid = os.fork()
    if pid:
        try:
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        except BaseException:  # for example a timeout
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        code = run()
    finally:
        os._exit(code)


def run_module(name, *words) -> CompletedProcess:
    """Run a module as `python -m` does, but in a fork, which saves importing torch again. Return the exit
    code and the output.
    """
    words = list(map(str, words))
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        code = exit_code_of(lambda: _run(name, words, out, err))
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return CompletedProcess([name, *words], code, *texts)


def _run(name, words, out, err) -> int:
    for fd, file in ((1, out), (2, err)):
        os.dup2(file.fileno(), fd)
    sys.stdout, sys.stderr = (os.fdopen(fd, "w", encoding="utf-8", closefd=False) for fd in (1, 2))
    logging.root.handlers = []  # Remove pytest's handlers.
    sys.argv = [name, *words]
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        return 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
