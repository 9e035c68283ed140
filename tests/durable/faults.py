"""Kill an engine's process before, in or after a write to its log, its store or its files.

A kill point is `WHERE SIDE NUMBER`. WHERE is the kind of write, named after the functions that call it. SIDE
is `before`, `in` or `after`. NUMBER counts the writes with this WHERE from 1, since the plan was read. When
the process reaches the first point in the file `FOLDER/plan`, the process removes this point and dies. Each
write's WHERE is logged in `FOLDER/trail`.
"""

import os
import signal
import sys
import threading
from collections import Counter

SYSTEM = ("write", "replace", "ftruncate", "fsync", "fdatasync")
IN_A_WRITE = "in"
_note = os.write  # kept, because `install` replaces os.write
_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC


class Faults:
    """Injects the planned kills into this process. Call `install` once, before anything is written."""

    def __init__(self, folder):
        self._plan, self._path = folder / "plan", folder / "trail"
        self._counts, self._trail = Counter(), None
        self._written_ns = None  # modification time of the plan that was read
        self._point = None
        self._lock = threading.Lock()

    def install(self):
        for name in SYSTEM:
            setattr(os, name, self._watched(getattr(os, name), name))
        from mmengine.serve.batch.progress import AnswerFile
        from mmengine.server.storage import database

        AnswerFile.write = self._watched(AnswerFile.write, "batch line")
        database._transaction.__exit__ = self._watched(database._transaction.__exit__, "store commit")

    def _watched(self, call, name):
        def watched(*given, **options):
            where = name if " " in name else _place(name)
            if where is None:
                return call(*given, **options)
            with self._lock:
                side = self._reached(where)
            if side == "before":
                self._die()
            if side == IN_A_WRITE:
                call(given[0], given[1][: len(given[1]) // 2])
                self._die()
            result = call(*given, **options)
            if side == "after":
                self._die()
            return result

        return watched

    def _reached(self, where):
        """Return when the process must die (before, in or after this write), or None."""
        try:
            written_ns = self._plan.stat().st_mtime_ns
        except FileNotFoundError:
            return None
        if written_ns != self._written_ns:
            self._written_ns = written_ns
            self._counts.clear()
            self._trail = os.open(self._path, _NEW)
            lines = self._plan.read_text().splitlines()
            self._point = tuple(lines[0].rsplit(" ", 2)) if lines else None
        self._counts[where] += 1
        _note(self._trail, f"{where}\n".encode())
        if self._point is not None and where == self._point[0] and self._counts[where] == int(self._point[2]):
            return self._point[1]
        return None

    def _die(self):
        _, *rest = self._plan.read_text().splitlines()
        self._plan.write_text("\n".join(rest))
        os.kill(os.getpid(), signal.SIGKILL)


def _place(name):
    """Return the kind of write, named by the innermost two mmengine functions on the stack.

    Returns None for a write by other code.
    """
    frame, found = sys._getframe(2), []
    while frame is not None and len(found) < 2:
        path = frame.f_code.co_filename
        if "/mmengine/" in path:
            found.append(f"{path.rpartition('/')[2].removesuffix('.py')}.{frame.f_code.co_name}")
        elif "/pathlib" not in path and "<frozen" not in path:
            break
        frame = frame.f_back
    return f"{name} of {' below '.join(found)}" if found else None
