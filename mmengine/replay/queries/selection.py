"""Selects and sorts the lines in a table of requests, and parses durations such as "500ms"."""

import re
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

from mmengine.errors import InvalidRequest
from mmengine.replay.queries.summaries import RequestLine

SortKey = Literal["total", "queued", "preempted"]
_KEYS: dict[str, Callable[[RequestLine], int]] = {
    "total": lambda line: line.end_ns,
    "queued": lambda line: line.admitted_ns,
    "preempted": lambda line: line.num_preemptions,
}
_DURATION = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)(ms|s|m|h)?")
_UNITS = {"ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9}


def duration_ns(text: str) -> int:
    """Convert a duration such as "2s", "500ms", "1.5m" or "2" (seconds) to ns. Raises InvalidRequest."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise InvalidRequest(f"{text!r} is not a duration; write 500ms, 2s or 1.5m")
    return round(float(match[1]) * _UNITS[match[2] or "s"])


class Selection(NamedTuple):
    """The criteria for the requests to show. `finish`: a finish reason, or "unfinished". `slower_ns`: select
    only requests that took longer than `slower_ns`, and unfinished requests.
    """

    preempted: bool = False
    finish: str = ""
    slower_ns: int = -1
    sort: SortKey | None = None

    @property
    def selects(self) -> bool:
        """Whether a criterion or an order is set."""
        return self != Selection()

    def has(self, line: RequestLine) -> bool:
        """Return whether a request is shown."""
        if self.preempted and not line.num_preemptions:
            return False
        if self.finish and (line.finish_reason or "unfinished") != self.finish:
            return False
        return self.slower_ns < 0 or line.end_ns < 0 or line.end_ns > self.slower_ns

    def of(self, lines: Iterable[RequestLine], limit: int) -> tuple[list[RequestLine], int]:
        """Return at most `limit` lines, and the total number of selected requests.

        With `sort`, requests without a value come first, because they still wait or run. The other requests
        follow, largest value first. Without `sort`, the last lines are returned.
        """
        found = [line for line in lines if self.has(line)]
        if self.sort is None:
            return found[-limit:], len(found)
        key = _KEYS[self.sort]
        found.sort(key=lambda line: (key(line) >= 0, -key(line)))
        return found[:limit], len(found)
