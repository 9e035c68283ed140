"""Processes of their own for tests that kill them."""

import os


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
