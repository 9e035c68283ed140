"""Finds out whether a log was closed, is still being written, was not closed, or lacks segments. The commands
`verify`, `fsck` and `show` print the result.

Only a footer proves that a log is complete. Without a footer, a truncated file looks like the file of a
killed process. Segments are missing if the last footer announces another segment. They are also missing if a
snapshot contains the state after a record that the log lacks.
"""

from dataclasses import dataclass
from pathlib import Path

from mmengine.errors import CorruptLog
from mmengine.events.lock import is_locked
from mmengine.events.recovery import Walk, walk_segment
from mmengine.events.segment import Follows, part_of, segment_paths, snapshot_sequences

MISSING, UNCLOSED = "end", "unclosed"  # values of `LogEnd.kind`


@dataclass(frozen=True, slots=True)
class LogEnd:
    """How a log ends. `kind`: a key in KINDS (events/fsck.py), or "" if nothing is missing. `text`: a clause
    for error messages.
    """

    kind: str
    text: str


WRITTEN = LogEnd("", "a writer is at work")
CLOSED = LogEnd("", "closed by its writer")


def log_end(folder: Path, had_writer: bool = False) -> LogEnd:
    """Return how the log ends, according to its last segment. `had_writer`: whether a writer was running
    while the caller read the log.
    """
    if had_writer or is_locked(folder):
        return WRITTEN
    try:
        return _end(folder)
    except CorruptLog as error:
        return LogEnd(error.kind, str(error))


def check_end(walk: Walk) -> None:
    """Raise CorruptLog if segments after the last existing segment are missing. The missing records were
    acknowledged, so the log must not be continued without them. `walk`: a walk over the last segment. The
    caller holds the log's lock.
    """
    if not walk.path.stat().st_size:  # examine the last segment that is not empty
        filled = [one for one in segment_paths(walk.path.parent) if one.stat().st_size]
        if not filled:
            return
        walk = walk_segment(filled[-1])
    if (lost := _lost(walk)) is not None:
        raise CorruptLog(
            f"{lost.text}; restore the missing file, or continue without it in the mode salvage", MISSING
        )


def _end(folder: Path) -> LogEnd:
    paths = segment_paths(folder)
    filled = [path for path in paths if path.stat().st_size]
    if not filled:
        return LogEnd(MISSING, "the end is missing: all segments are empty")
    walk = walk_segment(filled[-1])
    lost = _lost(walk)
    if lost is not None:
        return lost
    if filled[-1] != paths[-1]:
        return LogEnd(MISSING, f"the end is missing: {paths[-1].name} is empty")
    return _how_it_ends(walk)


def _lost(walk: Walk) -> LogEnd | None:
    """Return a LogEnd if a file shows that segments are missing, else None."""
    folder = walk.path.parent
    snapshots, behind = snapshot_sequences(folder), walk.recovery.next_sequence
    last = behind - 1
    if walk.scan.follows is Follows.SEGMENT and not part_of(folder, behind).exists():
        what = f"{walk.path.name} says that another segment follows record {last}"
    elif snapshots and snapshots[-1] > last:
        what = f"a snapshot holds the state after record {snapshots[-1]}"
    else:
        return None
    return LogEnd(MISSING, f"the end is missing: {what}, and the log stops at record {last}")


def _how_it_ends(walk: Walk) -> LogEnd:
    torn = walk.recovery.torn
    if torn is not None:
        return LogEnd(torn.kind, str(torn))
    match walk.scan.follows:
        case Follows.NOTHING:
            return CLOSED
        case Follows.REPAIRED:
            return LogEnd("", "closed by a repair, because its writer was gone")
    last = walk.recovery.next_sequence - 1
    where = f"after record {last}" if last >= 0 else "before its first record"
    return LogEnd(
        UNCLOSED,
        f"the log was not closed: its process was killed {where}, or the file was cut there, between two "
        "frames; the files do not tell which",
    )
