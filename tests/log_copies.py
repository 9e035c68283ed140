"""Copies of a log that is being written, as a kill would leave it."""

import shutil
from contextlib import suppress

TRIES = 9


def copied(log, target, *left_out):
    """Without what has one of these names. What is written whole under another name first is nobody's yet,
    and may be gone before it is copied; so may what is let go of once it stands elsewhere: then the copy
    begins again."""
    ignored = shutil.ignore_patterns("*.part", *left_out)
    for _ in range(TRIES - 1):
        with suppress(shutil.Error, FileNotFoundError):
            return shutil.copytree(log, target, ignore=ignored)
        shutil.rmtree(target, ignore_errors=True)
    return shutil.copytree(log, target, ignore=ignored)
