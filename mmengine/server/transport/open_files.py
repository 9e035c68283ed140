"""Raises and reads the limit for files and sockets that this process may open."""

import resource
import sys
from contextlib import suppress


def raise_limit() -> None:
    """Raise the soft limit to the hard limit.

    The usual soft limit (1024) exists for programs that call select(2), which this program does not use.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # macOS reports an infinite hard limit, which it rejects as a soft limit.
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def most_connections() -> int:
    """Return the maximum number of connections: half the limit for open files, because answers and the engine
    also open files.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else max(1, soft // 2)
