"""The number of files and sockets that this process may open."""

import resource
import sys
from contextlib import suppress


def raise_limit() -> None:
    """Raise the soft limit to the hard limit.

    The usual soft limit (1024) protects programs that call select(2), which this program does not.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # macOS has no hard limit, and rejects that as a soft limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def most_connections() -> int:
    """Return half the limit: answers may read files, and the engine opens some, too."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else max(1, soft // 2)
