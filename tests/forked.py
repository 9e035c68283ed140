"""Processes of their own: for tests that kill them, and that look at their memory."""

import os

# Before a command. To Linux the most memory of a program begins with that of the process it was forked from,
# which may be gigabytes of the tests' own: a shell that forks has little.
WITH_OWN_PEAK = ("sh", "-c", '"$@"; exit $?', "sh")


def exit_code_of(run):
    """What `run` gives in a fork of this process, which says nothing of what goes wrong: negative where it
    was killed, by that signal."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        code = run()
    finally:
        os._exit(code)
