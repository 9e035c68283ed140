"""Copies of a log while it is being written, as a kill would leave it."""

import shutil
from contextlib import suppress

TRIES = 9


def copied(log, target, *left_out):
    """Copy the folder without the entries named in `left_out`.

    A file that is first written under a temporary name may vanish before it is copied; so may a file that is
    deleted once its replacement exists. Then the copy starts again.
    """
    ignored = shutil.ignore_patterns("*.part", *left_out)
    for _ in range(TRIES - 1):
        with suppress(shutil.Error, FileNotFoundError):
            return shutil.copytree(log, target, ignore=ignored)
        shutil.rmtree(target, ignore_errors=True)
    return shutil.copytree(log, target, ignore=ignored)
