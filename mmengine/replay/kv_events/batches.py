"""The batches of a log, numbered, as bytes: read once for who subscribes, and again for who missed some."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from mmengine.errors import MMEngineError
from mmengine.events.codec import TornRecord
from mmengine.events.segment import Scan, opened, segment_paths
from mmengine.replay.checked import CheckedLog
from mmengine.replay.kv_events.projection import KVProjection
from mmengine.replay.kv_events.wire import EventBatch, packed

NS = 10**9


class Numbered(NamedTuple):
    """A batch with its number: 0, 1, … as the log counts them. Where the log's beginning is gone, the first
    has the number of the record that comes first: a batch is of one record, so it has no smaller number than
    when all of the log was there."""

    seq: int
    payload: bytes


def batches(
    folder: Path, wait: Callable[[], bool] | None = None, *, until: int | None = None
) -> Iterator[Numbered]:
    """Of the log in `folder` from its beginning. With `wait` it goes on with what is appended (see
    LogFollower); `until`: the number of the first batch that is not wanted.

    Raises LogError when there is no log, CorruptLog when it is damaged or contradicts itself.
    """
    log = CheckedLog(folder, wait)
    state = log.first_state()
    projection, offset_ns = KVProjection(state), _wall_offset_ns(folder)
    told, mono_ns = projection.first(), log.first.mono_ns if log.first is not None else 0
    seq = log.begins_after + 1
    if until is not None and until <= seq:
        return
    yield Numbered(seq, packed(EventBatch((mono_ns + offset_ns) / NS, told)))
    for record in log:
        projection.before(record.event)
        with log.naming(record):
            log.apply(state, record.event)
        told = projection.after(record.event)
        if told:
            seq += 1
            if seq == until:
                return
            yield Numbered(seq, packed(EventBatch((record.mono_ns + offset_ns) / NS, told)))


def _wall_offset_ns(folder: Path) -> int:
    """What makes a time of day of the log's own clock, as its first segment says; 0 where that is unknown."""
    try:
        with opened(segment_paths(folder)[0]) as data:
            scan = Scan(data)
            next(scan.frames(), None)
    except (MMEngineError, TornRecord, IndexError):
        return 0
    return 0 if scan.header is None else scan.header.wall_ns - scan.header.mono_ns
