"""Follows a log, and writes messages for the live page to stdout, as lines of JSON.

The server runs `python -m mmengine.server.live.follower FOLDER`. In a separate process, the follower does not
slow the engine.
"""

import contextlib
import os
import sys
import time
from pathlib import Path

import msgspec

from mmengine.errors import MMEngineError
from mmengine.replay.checked_log import CheckedLog
from mmengine.replay.report.live import LiveReport

EVERY_S = 0.1  # Minimum seconds between two messages.
LOOK_S = 0.02  # Seconds between two checks for new records.
NEWEST = 2**63 - 1  # Larger than any record number: reading begins at the newest snapshot.
NICENESS = 5  # Lower priority than the engine.


class _Page:
    """Derives the state from the log's records, and writes messages to stdout."""

    def __init__(self, folder: Path):
        self._due = 0.0
        self._report: LiveReport | None = None
        log = CheckedLog(folder, self._wait, NEWEST)
        self._report = LiveReport(log, folder.name)
        for record in log:
            self._report.take(record)
            self._tell()

    def _tell(self) -> None:
        now = time.monotonic()
        if self._report is None or now < self._due:
            return
        self._due = now + EVERY_S
        for message in self._report.news():
            sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
        sys.stdout.buffer.flush()

    def _wait(self) -> bool:
        """Wait at the log's end. Always returns True, so that CheckedLog continues with new records."""
        self._tell()
        time.sleep(LOOK_S)
        return True


def main() -> None:
    os.nice(NICENESS)
    # These errors mean that the server has ended or the last page is closed.
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        try:
            _Page(Path(sys.argv[1]))
        except MMEngineError as error:
            sys.exit(str(error))


if __name__ == "__main__":
    main()
