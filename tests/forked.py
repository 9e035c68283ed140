"""Separate processes, for tests that kill them or measure their memory."""

import os

# A prefix for a command. On Linux a program's peak memory starts with that of the process that forked it,
# which may be gigabytes of the tests' own; a shell that forks has little.
WITH_OWN_PEAK = ("sh", "-c", '"$@"; exit $?', "sh")


def exit_code_of(run):
    """Return the exit code of `run` in a fork of this process, without error output; negative: the signal
    that killed it.
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
