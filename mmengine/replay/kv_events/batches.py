"""Yields a log's KV event batches, numbered and encoded for subscribers. The numbers depend only on the log,
so missed batches can be sent again.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from mmengine.core.fold.evolve import evolve
from mmengine.errors import MMEngineError
from mmengine.events.codec import TornRecord
from mmengine.events.segment import Scan, open_segment, segment_paths
from mmengine.replay.checked_log import CheckedLog
from mmengine.replay.findings import Findings
from mmengine.replay.kv_events.projection import KVProjection
from mmengine.replay.kv_events.wire import EventBatch, packed

NS = 10**9


class Numbered(NamedTuple):
    """An encoded batch with its number. A log's batches are numbered 0, 1, … in order.

    If the log's beginning was deleted, the first batch has the number of the first record. A record creates
    at most one batch, so no later batch gets a lower number than before the deletion.
    """

    seq: int
    payload: bytes


def batches(
    folder: Path,
    wait: Callable[[], bool] | None = None,
    *,
    until: int | None = None,
    findings: Findings | None = None,
) -> Iterator[Numbered]:
    """Yield the batches of the log in `folder` from its beginning.

    `wait`: as in CheckedLog, to continue with records that the engine appends later. `until`: end before the
    batch with this number. `findings`: see CheckedLog. Raises LogError if there is no log, and CorruptLog for
    a damaged or inconsistent log.
    """
    log = CheckedLog(folder, wait, findings=findings)
    state = log.first_state()
    projection, offset_ns = KVProjection(state), _wall_offset_ns(folder)
    events, mono_ns = projection.first(), log.first.mono_ns if log.first is not None else 0
    seq = log.begins_after + 1
    if until is not None and until <= seq:
        return
    yield Numbered(seq, packed(EventBatch((mono_ns + offset_ns) / NS, events)))
    for record in log:
        events = []
        with log.naming(record):
            log.check(state, record.event)
            projection.before(record.event)
            evolve(state, record.event)
            events = projection.after(record.event)
        if events:
            seq += 1
            if seq == until:
                return
            yield Numbered(seq, packed(EventBatch((record.mono_ns + offset_ns) / NS, events)))


def _wall_offset_ns(folder: Path) -> int:
    """Return wall-clock time minus monotonic time in ns, from the log's first segment; 0 if unknown."""
    try:
        with open_segment(segment_paths(folder)[0]) as data:
            scan = Scan(data)
            next(scan.frames(), None)
    except (MMEngineError, TornRecord, IndexError):
        return 0
    return 0 if scan.header is None else scan.header.wall_ns - scan.header.mono_ns
