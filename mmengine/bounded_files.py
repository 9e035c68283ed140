"""Reads whole files with limits on size and waiting time, for paths from options and checkpoints."""

import errno
import os
import select
import stat
from pathlib import Path

PIPE_S = 10.0  # Maximum number of seconds to wait for data from a named pipe.
_PIECE = 2**20
_READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """Return a file's bytes. Raises OSError: EFBIG for more than `max_bytes` bytes, and ETIMEDOUT if a named
    pipe has no data for PIPE_S seconds.
    """
    # Without O_NONBLOCK, opening a named pipe would wait for a writer.
    with os.fdopen(os.open(path, _READ), "rb", buffering=0) as file:
        is_pipe = stat.S_ISFIFO(os.fstat(file.fileno()).st_mode)
        pieces, left = [], max_bytes + 1
        while left:
            if is_pipe and not select.select([file], [], [], PIPE_S)[0]:
                raise OSError(errno.ETIMEDOUT, "nothing was written into the pipe", str(path))
            if not (piece := file.read(min(left, _PIECE))):
                break
            pieces.append(piece)
            left -= len(piece)
    if not left:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes", str(path))
    return b"".join(pieces)
