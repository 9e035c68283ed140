"""Writes events to log folders. Each log gets a new folder."""

import shutil
from pathlib import Path

from mmengine.errors import LogError
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogWriter
from mmengine.events.segment import segment_paths
from mmengine_vllm.bases import Base, EncodedItems, Written
from mmengine_vllm.host_facts import begun_midway

_MOST_NAMES = 10_000


def free_folder(path: str, after: Path | None = None) -> Path:
    """Return the first of PATH, PATH-2, PATH-3, … that contains no log and comes after the folder `after`.
    Raises LogError if there is none.
    """
    first, lowest = Path(path), 1
    if after is not None:
        lowest = 1 + (1 if after == first else int(after.name.rpartition("-")[2]))
    for number in range(lowest, lowest + _MOST_NAMES):
        folder = first if number == 1 else first.with_name(f"{first.name}-{number}")
        if not folder.exists() or folder.is_dir() and not segment_paths(folder):
            return folder
    raise LogError(f"{first} and {_MOST_NAMES} folders after it hold logs already; name another folder")


class LogFile:
    """A log on disk. If an event is earlier than its predecessor, the event gets the predecessor's time.
    Raises LogError if the folder cannot be written.
    """

    def __init__(self, folder: Path, started: ev.Started, ns: int):
        self.folder = folder
        self._writer = LogWriter(folder)
        self._now = 0
        self.write([(started, 0, ns)])

    @property
    def num_bytes(self) -> int:
        return self._writer.num_bytes

    def write(self, events: Written) -> None:
        """Append events and commit them. Raises LogError if the disk is full, and the log then ends."""
        append, now = self._writer.append, self._now
        for event, step, ns in events:
            if ns > now:
                now = ns
            append(event, step, now)
        self._now = now
        if not self._writer.commit() or self._writer.stalled:
            raise LogError(self._writer.stalled)
        self._writer.tidy()

    def close(self, last: ev.Event | None = None, step: int = 0) -> None:
        """Write a last record and close the log. Raises LogError if this fails."""
        if last is not None:
            self._writer.append(last, step, self._now)
        self._writer.close()


class LogSeries:
    """A log that continues in a new folder when the current folder reaches half of `max_bytes` (0: never).

    The oldest folders are deleted, so that all folders of the series together have about `max_bytes` at most.
    """

    def __init__(self, path: str, max_bytes: int, started: ev.Started):
        self._path, self._most, self._started = path, max_bytes, started
        self._file = LogFile(free_folder(path), started, 0)
        self._full: list[LogFile] = []
        self._items: EncodedItems | None = None
        self._shift = 0  # the step in the current folder minus the recorder's step

    @property
    def folder(self) -> Path:
        """The current folder."""
        return self._file.folder

    def is_due(self) -> bool:
        """Return whether a new folder must be begun."""
        return bool(self._most) and self._file.num_bytes > self._most // 2

    def begin(self, base: Base) -> None:
        """Begin a new folder with the events in `base`. Raises LogError."""
        started = begun_midway(self._started, {"follows": self.folder.name})
        file = LogFile(free_folder(self._path, self.folder), started, base.ns)
        self._file.close()
        self._full.append(self._file)
        while len(self._full) > 1:
            shutil.rmtree(self._full.pop(0).folder)
        self._file, self._items, self._shift = file, base.items(), base.shift
        self._file.write([(event, step, base.ns) for event, step in base.events])

    def write(self, events: Written) -> None:
        """Write events. Raises LogError."""
        if self._items is not None:
            kept = ((self._items.adapted(event), step, ns) for event, step, ns in events)
            events = [
                (event, max(0, step + self._shift), ns) for event, step, ns in kept if event is not None
            ]
        self._file.write(events)

    def close(self, last: ev.Event | None, step: int) -> None:
        """Write a last record and close the log. Raises LogError."""
        self._file.close(last, max(0, step + self._shift))
