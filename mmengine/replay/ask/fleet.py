"""Logs of replicas side by side: where a request went, which replica said what of it, and who ended it.

A request that moved stands in several logs, choice by choice: under its own id where it began, and under that
of the choice (`id/0`, `id/1`) where it went on. What came along with it is in its QUEUED.
"""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from mmengine.errors import CorruptLog, LogError
from mmengine.events.segment import segment_paths
from mmengine.replay.ask.show import RequestLine, request_lines

MAX_LOGS = 100_000  # of one folder


class Stop(msgspec.Struct, frozen=True):
    """A request, or a choice of it, in one log. `num_given`: tokens of its answer that came along.
    `num_said`: those that this replica computed. `end`: "" where the log knows of none."""

    log: str
    core_id: str
    num_given: int
    num_said: int
    end: str
    detail: str


class Way(msgspec.Struct, frozen=True):
    """Of one choice of a request the stops, in the order in which it went."""

    core_id: str
    stops: list[Stop]

    @property
    def num_tokens(self) -> int:
        """Of the answer, as far as the logs know."""
        return max(stop.num_given + stop.num_said for stop in self.stops)

    @property
    def num_computed(self) -> int:
        """Tokens of the answer that replicas computed, those computed twice counted twice."""
        return sum(stop.num_said for stop in self.stops)

    @property
    def end(self) -> str:
        return self.stops[-1].end


def logs_in(folder: Path) -> list[Path]:
    """The folder, where it is a log itself, or the logs right below it, by name. Raises LogError."""
    if segment_paths(folder):
        return [folder]
    found = [path for path in sorted(folder.iterdir()) if path.is_dir() and segment_paths(path)]
    if len(found) > MAX_LOGS:
        raise LogError(f"{folder} holds more than {MAX_LOGS:,} logs; give a folder of fewer")
    return found


def is_fleet(folder: Path) -> bool:
    """Whether it holds logs, and is none."""
    return not segment_paths(folder) and bool(logs_in(folder))


def ways_in(logs: Iterable[Path]) -> tuple[dict[str, Way], dict[Path, str]]:
    """By core id, in order of arrival within each log; and why a log could not be read to its end."""
    stops: dict[str, list[Stop]] = {}
    broken: dict[Path, str] = {}
    for log in logs:
        try:
            lines = request_lines(log)
        except CorruptLog as error:
            broken[log] = str(error)
            continue
        for line in lines:
            stops.setdefault(line.request_id, []).append(_stop(log, line))
    ways = {}
    for core_id, found in stops.items():
        found.sort(key=lambda stop: (stop.num_given, stop.end not in ("", "abort"), stop.num_said))
        ways[core_id] = Way(core_id, found)
    return ways, broken


def _stop(log: Path, line: RequestLine) -> Stop:
    said = line.num_output_tokens - line.num_given_tokens
    return Stop(log.name, line.request_id, line.num_given_tokens, said, line.finish_reason, line.detail)


def ids_of(ways: Iterable[str], request_id: str) -> list[str]:
    """The core ids of a request: its own, and those of its choices."""
    return [name for name in ways if name == request_id or name.rpartition("/")[0] == request_id]


def story(way: Way) -> list[str]:
    """Sentences, one for each stop."""
    told = []
    for place, stop in enumerate(way.stops):
        is_last = place == len(way.stops) - 1
        came = f"came with {stop.num_given} tokens of its answer" if stop.num_given else "came"
        said = (
            f"{came}, was given {stop.num_said} more"
            if stop.num_given
            else f"{came}, was given {stop.num_said} tokens"
        )
        if stop.end and (is_last or stop.end != "abort"):
            how = f"and ended there: {stop.end}" + (f" ({stop.detail})" if stop.detail else "")
        elif stop.end:
            how = "and was let go of there, to go on elsewhere"
        else:
            how = "and was unfinished when that replica's log ended"
        told.append(f"{stop.log}: it {said}, {how}.")
    return told
