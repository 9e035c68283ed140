"""Follows a log and writes each message for live pages as a line of JSON.

Runs as a process of its own, so that it takes no time from the engine: `python -m
mmengine.server.live.follower FOLDER`.
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

EVERY_S = 0.1  # least seconds between two messages
LOOK_S = 0.02  # seconds between two checks for new records
NEWEST = 2**63 - 1  # a sequence number after all others: the fold begins at the newest snapshot
NICENESS = 5  # the engine has priority


class _Page:
    """Folds the log and writes messages to stdout."""

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
        """Wait for records at the log's end. Return True to go on."""
        self._tell()
        time.sleep(LOOK_S)
        return True


def main() -> None:
    os.nice(NICENESS)
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):  # no page is open any more
        try:
            _Page(Path(sys.argv[1]))
        except MMEngineError as error:
            sys.exit(str(error))


if __name__ == "__main__":
    main()
