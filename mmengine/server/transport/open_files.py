"""Raises the process's limit on open files, and derives the maximum number of connections."""

import resource
import sys
from contextlib import suppress


def raise_limit() -> None:
    """Raise the soft limit on open files to the hard limit.

    The usual soft limit (1024) protects programs that call select(2). mmengine never calls select(2).
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # macOS reports an infinite hard limit, but rejects an infinite soft limit.
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def most_connections() -> int:
    """Return the maximum number of connections: half the limit on open files, because responses and the
    engine also open files.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else max(1, soft // 2)
