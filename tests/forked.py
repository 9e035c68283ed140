"""Separate processes, for tests that kill them or measure their memory."""

import os

# A prefix for a command whose peak memory a test measures. On Linux a program's peak begins with the memory
# of the process that forked it. The test process may have gigabytes; a shell that forks has little.
WITH_OWN_PEAK = ("sh", "-c", '"$@"; exit $?', "sh")


def exit_code_of(run):
    """Call `run` in a fork of this process, and return its exit code. If a signal killed the fork, the code
    is the signal's number, negated. The fork's error output is discarded.
    """
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        code = run()
    finally:
        os._exit(code)
