"""How many files, sockets among them, this process may have open."""

import resource
import sys
from contextlib import suppress


def raise_limit() -> None:
    """To all that the system lets this process have: the lower limit that most begin with (1024) is for
    programs that call select(2), which this one does not."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # macOS has no hard limit, and does not take that as a soft one
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def most_connections() -> int:
    """Half of them: an answer may read a file, and the engine has some, too."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else max(1, soft // 2)
