"""Finds out whether other settings would have changed a log's decisions.

The engine's loop runs with the other settings, on the arrivals and tokens in the log. Each decision is
compared with the logged decision. Block numbers may differ, because they depend on the pool's size.
"""

from pathlib import Path
from typing import NamedTuple

from mmengine.config import EngineConfig
from mmengine.core.decide.scheduler import DECISION_VERSION
from mmengine.errors import CorruptLog
from mmengine.events import vocabulary as ev
from mmengine.replay.checked_log import CheckedLog
from mmengine.replay.hosted.verify import verify_hosted
from mmengine.replay.tape import LogTape
from mmengine.replay.verify import derive
from mmengine.replay.verify_report import Divergence, VerifyReport

# Decision fields with block numbers and encoder cache keys. These fields do not determine which tokens a step
# computes.
_PLACES = frozenset(("new_blocks", "blocks", "block_counts", "evict", "keys"))


class Same(NamedTuple):
    """Whether two runs make the same decisions. `why`: the reason for a difference, worded as the end of a
    sentence.
    """

    is_same: bool
    why: str = ""


def compare_decisions(folder: Path, config: EngineConfig) -> Same:
    """Return whether the settings lead to the log's decisions, given the log's arrivals and tokens. Raises
    LogError and CorruptLog for a log that cannot be read.
    """
    log = CheckedLog(folder)
    is_changed = config != log.config
    if is_changed and log.begins_after >= 0:
        return Same(False, "the log's beginning was deleted, so its first state holds the old settings")
    log.config = config
    if log.started.host:
        hosted = verify_hosted(log)
        if hosted.divergence is None:
            return Same(hosted.rederived, hosted.caveat)
        return _differs(hosted.divergence)
    if log.started.decision_version != DECISION_VERSION:
        text = f"the log was decided by version {log.started.decision_version} of the rules, and this build"
        return Same(False, f"{text} has version {DECISION_VERSION}")
    report = VerifyReport(begins_after=log.begins_after)
    tape = (_LooseTape if is_changed else LogTape)(iter(log), report, None)
    try:
        found = derive(tape, log, False)
    except CorruptLog:
        if is_changed:  # The results in the log do not fit the changed state.
            return Same(False, "the settings lead to other decisions")
        raise
    return _differs(found) if isinstance(found, Divergence) else Same(True)


def _differs(found: Divergence) -> Same:
    return Same(False, f"the decisions differ from step {found.step} on ({found.event}, {found.field})")


class _LooseTape(LogTape):
    """A tape (the log's events) that ignores differences in block numbers."""

    def append(self, event: ev.Event, step: int, mono_ns: int) -> None:
        logged = None if self.next is None else self.next.event
        if logged is not None and type(logged) is type(event) and _is_like(logged, event):
            event = logged
        super().append(event, step, mono_ns)


def _is_like(logged: ev.Event, event: ev.Event) -> bool:
    if isinstance(event, (ev.Started, ev.Checkpoint)):
        return True
    names = [name for name in event.__struct_fields__ if getattr(event, name) != getattr(logged, name)]
    for name in names:
        if name == "cached_blocks" and len(getattr(event, name)) == len(getattr(logged, name)):
            continue
        if name not in _PLACES:
            return False
    return True
