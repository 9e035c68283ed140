"""Follows requests across replicas' logs: which replicas had a request, the tokens from each, and which
replica ended the request.

A migrated request is in several logs, choice by choice: under its own id in the first log, and under the
choice's id (`id/0`, `id/1`) in the next. The choice's QUEUED has the earlier tokens.
"""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from mmengine.errors import CorruptLog, LogError
from mmengine.events.segment import segment_paths
from mmengine.replay.queries.summaries import RequestLine, request_lines

MAX_LOGS = 100_000  # Most logs in a folder.


class Stop(msgspec.Struct, frozen=True):
    """A request, or one of its choices, in one log.

    `num_given` counts its answer's tokens from earlier replicas, `num_said` the tokens from this replica.
    `end` is "" if the log has no end for the request.
    """

    log: str
    core_id: str
    num_given: int
    num_said: int
    end: str
    detail: str


class ReplicaPath(msgspec.Struct, frozen=True):
    """A choice's stops, in the order of its migration."""

    core_id: str
    stops: list[Stop]

    @property
    def num_tokens(self) -> int:
        """Return how many answer tokens the logs have."""
        return max(stop.num_given + stop.num_said for stop in self.stops)

    @property
    def num_computed(self) -> int:
        """Return the number of answer tokens that replicas computed; repeated tokens count twice."""
        return sum(stop.num_said for stop in self.stops)

    @property
    def end(self) -> str:
        return self.stops[-1].end


def logs_in(folder: Path) -> list[Path]:
    """Return the folder if it contains a log, otherwise the direct subfolders with logs. Raises LogError."""
    if segment_paths(folder):
        return [folder]
    found = [path for path in sorted(folder.iterdir()) if path.is_dir() and segment_paths(path)]
    if len(found) > MAX_LOGS:
        raise LogError(f"{folder} contains more than {MAX_LOGS:,} logs; name a folder with fewer")
    return found


def is_fleet(folder: Path) -> bool:
    """Return whether the folder contains logs, and is not a log."""
    return not segment_paths(folder) and bool(logs_in(folder))


def replica_paths(logs: Iterable[Path]) -> tuple[dict[str, ReplicaPath], dict[Path, str]]:
    """Return the paths by core id, sorted by arrival within each log, and the errors of logs that could not
    be read to their end.
    """
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
    paths = {}
    for core_id, found in stops.items():
        found.sort(key=lambda stop: (stop.num_given, stop.end not in ("", "abort"), stop.num_said))
        paths[core_id] = ReplicaPath(core_id, found)
    return paths, broken


def _stop(log: Path, line: RequestLine) -> Stop:
    said = line.num_output_tokens - line.num_given_tokens
    return Stop(log.name, line.request_id, line.num_given_tokens, said, line.finish_reason, line.detail)


def core_ids(names: Iterable[str], request_id: str) -> list[str]:
    """Return a request's core ids: its own, and its choices'."""
    return [name for name in names if name == request_id or name.rpartition("/")[0] == request_id]


def describe_path(path: ReplicaPath) -> list[str]:
    """Return a sentence for each stop."""
    sentences = []
    for place, stop in enumerate(path.stops):
        is_last = place == len(path.stops) - 1
        arrival = f"arrived with {stop.num_given} answer tokens" if stop.num_given else "arrived"
        more = f"{stop.num_said} more" if stop.num_given else f"{stop.num_said} answer tokens"
        if stop.end and (is_last or stop.end != "abort"):
            how = f"ended: {stop.end}" + (f" ({stop.detail})" if stop.detail else "")
        elif stop.end:
            how = "migrated to another replica"
        else:
            how = "was unfinished at the end of this log"
        sentences.append(f"{stop.log}: {arrival}, computed {more}, {how}.")
    return sentences
