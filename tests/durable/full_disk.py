"""Simulates a full disk while the file `FOLDER/full` exists.

A write to the log stores only the first half, and allocating space raises OSError. The store raises SQLite's
error for a full disk. A write to an answer file fails halfway. The log can be written again after it has
released its reserve, unless `FOLDER/full` contains "wholly".
"""

import errno
import os
import sys
from types import SimpleNamespace


def install(folder):
    """Install the faults in an engine's process, before anything is written."""
    marker, reserve = folder / "full", folder / "log" / "reserve"
    write, allocate, statvfs = os.write, os.posix_fallocate, os.statvfs

    def is_full():
        return marker.exists()

    def of_log():
        frame = sys._getframe(2)
        while frame is not None and "/mmengine/" not in frame.f_code.co_filename:
            frame = frame.f_back
        return frame is not None and "/mmengine/events/" in frame.f_code.co_filename

    def writing(fd, data):
        if of_log() and is_full() and (reserve.exists() or marker.read_text() == "wholly"):
            return write(fd, data[: len(data) // 2])
        return write(fd, data)

    def allocating(fd, offset, length):
        if is_full():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return allocate(fd, offset, length)

    def looking(path):
        return SimpleNamespace(f_bavail=0, f_frsize=1) if is_full() else statvfs(path)

    os.write, os.posix_fallocate, os.statvfs = writing, allocating, looking
    _fill_store(is_full)
    _fill_files(is_full)


def _fill_store(is_full):
    from mmengine.server.storage.database import _transaction

    enter = _transaction.__enter__

    def entering(self):
        count = self._connection.execute("PRAGMA page_count").fetchone()[0] if is_full() else 2**30
        self._connection.execute(f"PRAGMA max_page_count={count}").fetchone()
        return enter(self)

    _transaction.__enter__ = entering


def _fill_files(is_full):
    from mmengine.serve.batch.progress import AnswerFile

    begin = AnswerFile.__init__

    def beginning(self, *given, **options):
        begin(self, *given, **options)
        self._file = _Torn(self._file, is_full)

    AnswerFile.__init__ = beginning


class _Torn:
    """A file. On the full disk, each write stores half of the bytes and fails."""

    def __init__(self, file, is_full):
        self._file, self._is_full = file, is_full

    def __getattr__(self, name):
        return getattr(self._file, name)

    def write(self, data):
        if self._is_full():
            self._file.write(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._file.write(data)
