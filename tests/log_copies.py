"""Copies a log while it is being written. The copy looks like a log whose writer was killed."""

import shutil
from contextlib import suppress

TRIES = 9


def copied(log, target, *left_out):
    """Copy a log's folder without the entries that match a pattern in `left_out`.

    If the writer renames or replaces a file meanwhile, the copy starts again, with at most 9 attempts.
    """
    ignored = shutil.ignore_patterns("*.part", *left_out)
    for _ in range(TRIES - 1):
        with suppress(shutil.Error, FileNotFoundError):
            return shutil.copytree(log, target, ignore=ignored)
        shutil.rmtree(target, ignore_errors=True)
    return shutil.copytree(log, target, ignore=ignored)
