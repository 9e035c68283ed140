"""Follows requests across the logs of several replicas: which replicas ran a request, how many tokens each
replica computed, and how the request ended.

A request that migrates appears in several logs with the same core id. The core id is the request id, or
`id/0`, `id/1`, … for the choices of a request with `n` answers. Each choice migrates independently. Its
QUEUED event on the next replica contains the tokens that earlier replicas computed.
"""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from mmengine.errors import CorruptLog, LogError
from mmengine.events.segment import segment_paths
from mmengine.replay.queries.summaries import RequestLine, request_lines

MAX_LOGS = 100_000  # Maximum number of logs in a folder.


class Hop(msgspec.Struct, frozen=True):
    """A choice's stay on a replica, from the replica's log. A request with a single answer has one choice.

    `num_given`: the number of answer tokens that earlier replicas computed. `num_said`: the number of answer
    tokens that this replica computed. `end`: the finish reason, or "" if the log does not contain the
    request's end.
    """

    log: str
    core_id: str
    num_given: int
    num_said: int
    end: str
    detail: str


class ReplicaPath(msgspec.Struct, frozen=True):
    """A choice's hops, sorted by the number of answer tokens that the choice had when it arrived."""

    core_id: str
    hops: list[Hop] = msgspec.field(name="stops")  # The field's name in --json output.

    @property
    def num_tokens(self) -> int:
        """The length of the answer in tokens, up to the end of the logs."""
        return max(hop.num_given + hop.num_said for hop in self.hops)

    @property
    def num_computed(self) -> int:
        """The number of answer tokens that all replicas computed. A token that two replicas computed counts
        twice.
        """
        return sum(hop.num_said for hop in self.hops)

    @property
    def end(self) -> str:
        return self.hops[-1].end


def logs_in(folder: Path) -> list[Path]:
    """Return [folder] if the folder is a log; otherwise return its direct subfolders that are logs. Raises
    LogError for more than MAX_LOGS logs.
    """
    if segment_paths(folder):
        return [folder]
    found = [path for path in sorted(folder.iterdir()) if path.is_dir() and segment_paths(path)]
    if len(found) > MAX_LOGS:
        raise LogError(f"{folder} contains more than {MAX_LOGS:,} logs; name a folder with fewer")
    return found


def is_fleet(folder: Path) -> bool:
    """Return whether the folder contains logs without being a log itself."""
    return not segment_paths(folder) and bool(logs_in(folder))


def replica_paths(logs: Iterable[Path]) -> tuple[dict[str, ReplicaPath], dict[Path, str]]:
    """Read the logs. Return the path of each core id, and the error of each damaged log. Core ids are in the
    order of their first occurrence.
    """
    hops: dict[str, list[Hop]] = {}
    broken: dict[Path, str] = {}
    for log in logs:
        try:
            lines = request_lines(log)
        except CorruptLog as error:
            broken[log] = str(error)
            continue
        for line in lines:
            hops.setdefault(line.request_id, []).append(_hop(log, line))
    paths = {}
    for core_id, found in hops.items():
        found.sort(key=lambda hop: (hop.num_given, hop.end not in ("", "abort"), hop.num_said))
        paths[core_id] = ReplicaPath(core_id, found)
    return paths, broken


def _hop(log: Path, line: RequestLine) -> Hop:
    said = line.num_output_tokens - line.num_given_tokens
    return Hop(log.name, line.request_id, line.num_given_tokens, said, line.finish_reason, line.detail)


def describe_path(path: ReplicaPath) -> list[str]:
    """Return a sentence for each hop."""
    sentences = []
    for place, hop in enumerate(path.hops):
        is_last = place == len(path.hops) - 1
        arrival = f"arrived with {hop.num_given} answer tokens" if hop.num_given else "arrived"
        more = f"{hop.num_said} more" if hop.num_given else f"{hop.num_said} answer tokens"
        if hop.end and (is_last or hop.end != "abort"):
            how = f"ended: {hop.end}" + (f" ({hop.detail})" if hop.detail else "")
        elif hop.end:
            how = "migrated to another replica"
        else:
            how = "was unfinished at the end of this log"
        sentences.append(f"{hop.log}: {arrival}, computed {more}, {how}.")
    return sentences
