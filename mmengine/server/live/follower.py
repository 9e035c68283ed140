"""Follows a log in a process of its own, so that the engine's has no part in it, and writes each message to a
page as a line of JSON: `python -m mmengine.server.live.follower FOLDER`."""

import contextlib
import os
import sys
import time
from pathlib import Path

import msgspec

from mmengine.errors import MMEngineError
from mmengine.replay.checked_log import CheckedLog
from mmengine.replay.report.live import LiveReport

EVERY_S = 0.1  # at least, between two messages
LOOK_S = 0.02  # between looks at the end of the log
NEWEST = 2**63 - 1  # a record behind all others: the fold begins behind the newest snapshot
NICENESS = 5  # the engine goes first


class _Page:
    """Who reads stdout."""

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
        """At the log's end."""
        self._tell()
        time.sleep(LOOK_S)
        return True


def main() -> None:
    os.nice(NICENESS)
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):  # nobody looks any more
        try:
            _Page(Path(sys.argv[1]))
        except MMEngineError as error:
            sys.exit(str(error))


if __name__ == "__main__":
    main()
