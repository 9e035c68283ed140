"""Writes events to a log folder, which must be new."""

from pathlib import Path

from mmengine.errors import LogError
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogWriter
from mmengine.events.segment import segment_paths

Written = list[tuple[ev.Event, int, int]]  # with step and time
_MOST_NAMES = 10_000


def free_folder(path: str, suffix: str = "") -> Path:
    """Return the first of PATH, PATH-2, PATH-3, … that holds no log. `suffix` comes before the number."""
    first = Path(path + suffix)
    for number in range(1, _MOST_NAMES):
        folder = first if number == 1 else first.with_name(f"{first.name}-{number}")
        if not folder.exists() or folder.is_dir() and not segment_paths(folder):
            return folder
    raise LogError(f"{first} and {_MOST_NAMES} folders after it hold logs already; name another folder")


class LogFile:
    """One log on disk. Times never decrease. Raises LogError if the folder cannot be written."""

    def __init__(self, folder: Path, started: ev.Started, ns: int):
        self.folder = folder
        self._writer = LogWriter(folder)
        self._now = 0
        self.write([(started, 0, ns)])

    @property
    def num_bytes(self) -> int:
        return self._writer.num_bytes

    def write(self, events: Written) -> None:
        """Append events and commit them. Raises LogError if the disk is full: then the log ends here."""
        for event, step, ns in events:
            self._now = max(self._now, ns)
            self._writer.append(event, step, self._now)
        if not self._writer.commit() or self._writer.stalled:
            raise LogError(self._writer.stalled)
        self._writer.tidy()

    def close(self, last: ev.Event | None = None, step: int = 0) -> None:
        """Write a last record and close the log. Raises LogError if this fails."""
        if last is not None:
            self._writer.append(last, step, self._now)
        self._writer.close()
