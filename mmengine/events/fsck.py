"""Checks each segment, frame and record in a log without applying the events, and repairs a torn tail on
request.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

from mmengine.errors import NO_END, CorruptLog, LogError
from mmengine.events import vocabulary as ev
from mmengine.events.codec import Record
from mmengine.events.lock import is_locked, lock
from mmengine.events.log_end import MISSING, UNCLOSED, LogEnd, log_end
from mmengine.events.reader import records_of
from mmengine.events.recovery import Recovery, Walk, repair_tail
from mmengine.events.segment import (
    SUFFIX,
    first_sequence_of,
    open_segment,
    segment_paths,
    snapshot_sequences,
)
from mmengine.events.snapshots import damage_of

# The kinds of findings, and the exit code of `mmengine log fsck` for each kind.
KINDS = {
    "checksum": 4,
    "length": 7,
    "version": 8,
    "oversize": 9,
    "link": 10,
    "locked": 11,
    "gap": 12,
    **NO_END,
}


@dataclass(frozen=True, slots=True)
class Finding:
    """A defect in a log. `kind`: a key in KINDS. `text`: a description in one line."""

    kind: str
    text: str


@dataclass(slots=True)
class SegmentIndex:
    """Summarises a segment: its header, its first and last record, and the number of events by kind.

    `is_closed`: whether the segment has a footer. `wall_ns`: the wall-clock time in the header. `queued`,
    `finished`, `delivered`: number of events of this kind. `tokens`: number of sampled tokens.
    """

    name: str
    format: int
    num_bytes: int
    is_closed: bool
    engine_version: str = ""
    wall_ns: int = 0
    records: int = 0
    first_sequence: int = 0
    last_sequence: int = 0
    first_step: int = 0
    last_step: int = 0
    first_mono_ns: int = 0
    last_mono_ns: int = 0
    queued: int = 0
    finished: int = 0
    delivered: int = 0
    tokens: int = 0


@dataclass(slots=True)
class FsckReport:
    """The result of a check. `repaired`: the bytes that a repair removed, or None without a repair.
    `has_writer`: whether a process is writing the log. `end`: how the log ends, or None if the check stopped
    before the first segment.
    """

    folder: Path
    segments: list[SegmentIndex] = field(default_factory=list)
    snapshots: list[int] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    has_writer: bool = False
    repaired: Recovery | None = None
    end: LogEnd | None = None

    @property
    def is_closed(self) -> bool:
        return bool(self.segments) and self.segments[-1].is_closed

    @property
    def exit_code(self) -> int:
        """The exit code for the first finding, or 0 without findings."""
        return KINDS[self.findings[0].kind] if self.findings else 0


def fsck(folder: Path, *, repair: bool = False) -> FsckReport:
    """Check a whole log. `repair`: remove a torn tail (an incomplete last record) and close the last segment.
    A log with a running writer is not repaired. Raises LogError if there is no log, or if the repair cannot
    be written.
    """
    report = FsckReport(folder, has_writer=is_locked(folder))
    if repair and report.has_writer:
        report.findings.append(
            Finding("locked", f"another process is writing the log in {folder}; stop it before a repair")
        )
        return report
    links = [path for path in sorted(folder.glob("*.mmlog*")) if path.is_symlink()]
    if links:
        report.findings += (
            Finding("link", f"{path.name} is a link; links are not followed") for path in links
        )
        return report
    if not segment_paths(folder):
        raise LogError(f"{folder} has no log: no file there ends in {SUFFIX}")
    if repair:
        report.repaired = _repair(folder)
    _check_all(folder, report)
    return report


def _repair(folder: Path) -> Recovery | None:
    """Repair only the log's end. Return None for earlier damage, which is not repaired."""
    try:
        fd = lock(folder)
    except OSError as error:
        raise LogError(f"{folder} cannot be repaired: {error.strerror}") from None
    try:
        return repair_tail(folder, "tail")
    except CorruptLog:
        return None
    finally:
        os.close(fd)


def _check_all(folder: Path, report: FsckReport) -> None:
    paths = segment_paths(folder)
    report.snapshots = snapshot_sequences(folder)
    recovery = Recovery("salvage", next_sequence=first_sequence_of(paths[0]) if paths else 0)
    begins = recovery.next_sequence
    if begins and (not report.snapshots or report.snapshots[-1] < begins - 1):
        report.findings.append(
            Finding("gap", f"the log begins with record {begins}, and no snapshot holds the state before it")
        )
    for path, after in zip(paths, [*paths[1:], None]):
        error = _check_segment(path, report, recovery, is_last=after is None)
        report.findings += _of_cuts(report, recovery)
        recovery.cuts.clear()
        if error is not None:
            report.findings.append(Finding(error.kind, str(error)))
            recovery.next_sequence = first_sequence_of(after) if after is not None else 0
    report.end = log_end(folder, report.has_writer)
    if report.end.kind in (MISSING, UNCLOSED):
        report.findings.append(Finding(report.end.kind, report.end.text))
    for sequence in report.snapshots:
        if what := damage_of(folder, sequence):
            report.findings.append(Finding("checksum", f"{what}; readers use another snapshot, or the log"))


def _check_segment(path: Path, report: FsckReport, recovery: Recovery, *, is_last: bool) -> CorruptLog | None:
    """Check one segment. Return the error that stops the check before the segment's end, or None."""
    index = SegmentIndex(path.name, 1, path.stat().st_size, False)
    report.segments.append(index)
    try:
        with open_segment(path) as data:
            walk = Walk(path, data, recovery, is_last=is_last)
            for frame in walk:
                for record in records_of(path, data, frame):
                    _note(index, record)
            _note_header(index, walk)
    except CorruptLog as error:
        return error
    return None


def _of_cuts(report: FsckReport, recovery: Recovery) -> list[Finding]:
    """Return the unreadable byte ranges in `recovery` as findings. An incomplete last record is not a finding
    while a writer runs: the writer may complete the record.
    """
    return [
        Finding(cut.kind, str(cut))
        for cut in recovery.cuts
        if not (report.has_writer and cut is recovery.torn and cut.kind == "truncated")
    ]


def _note_header(index: SegmentIndex, walk: Walk) -> None:
    header = walk.scan.header
    if header is not None:
        index.format, index.engine_version, index.wall_ns = (
            header.format,
            header.engine_version,
            header.wall_ns,
        )
    index.is_closed = walk.scan.is_closed


def _note(index: SegmentIndex, record: Record) -> None:
    if not index.records:
        index.first_sequence, index.first_step = record.sequence, record.step
        index.first_mono_ns = record.mono_ns
    index.records += 1
    index.last_sequence, index.last_step = record.sequence, record.step
    index.last_mono_ns = record.mono_ns
    event = record.event
    if isinstance(event, ev.Executed):
        index.tokens += len(event.token_ids) // 4
    elif isinstance(event, ev.Queued):
        index.queued += 1
    elif isinstance(event, ev.Finished):
        index.finished += 1
    elif isinstance(event, ev.Delivered):
        index.delivered += 1
