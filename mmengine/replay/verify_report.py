"""The result of verifying a log."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmengine.events.codec import Record
from mmengine.events.log_end import WRITTEN, LogEnd
from mmengine.events.recovery import Cut
from mmengine.events.vocabulary import Event
from mmengine.replay.findings import BrokenRule
from mmengine.version import __version__


@dataclass(slots=True)
class Divergence:
    """The first event that differs: its record and step, the field, both values, and the last observations
    before it.

    For a digest, `columns` and `requests` (id, row; -1: waiting) tell where the states differ, as far as the
    log allows. `agreed`: record and step at the last equal digest. `broken`: the rule of the state that the
    logged decision breaks, or None. `rule`: for a recorded log, the rule that the difference most likely
    concerns. `events`: the logged and the derived event, as far as they are known. `rows`: the request in
    each running row, and `last_rows`: the rows of the step before. `outcomes`: for a recorded log, the
    logged and the derived outcome of the scheduling call.
    """

    sequence: int
    step: int
    event: str
    field: str
    logged: Any
    derived: Any
    recent: list[Record]
    columns: list[str] = dataclasses.field(default_factory=list)
    requests: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    agreed: tuple[int, int] | None = None
    broken: BrokenRule | None = None
    rule: str = ""
    events: tuple[Event | None, Event | None] = (None, None)
    rows: dict[int, str] = dataclasses.field(default_factory=dict)
    last_rows: list[int] = dataclasses.field(default_factory=list)
    outcomes: tuple[object, object] | None = None

    @property
    def request_id(self) -> str:
        """The request that the logged event, or else the derived event, names, or ""."""
        names = (getattr(event, "request_id", "") for event in self.events)
        return next(filter(None, names), "")


@dataclass(slots=True)
class VerifyReport:
    """What `verify` found.

    `rederived` is False if the log was written under other decision rules (`logged_version` differs from
    `version`); the log was then only folded, and its digests compared. `unfinished`: requests (ids) without
    an end in the log. `begins_after`: the record number at the starting snapshot, or -1. `end`: how the log
    ends.

    For a recorded log: `host`, the engine that decided; `rules`, whose rules derived its decisions; `own`:
    the host's own scheduler that derived them instead ("vllm" or MODULE:CLASS), or ""; `calls`, the
    scheduling calls that agree; `caveat`, why the decisions were not derived, or by other rules than the
    host's (then `rederived` is False), or ""; `left_over`, the requests that the rules schedule next at the
    log's end.
    """

    steps: int = 0
    events: int = 0
    requests: int = 0
    tokens: int = 0
    checkpoints: int = 0
    begins_after: int = -1
    end: LogEnd = WRITTEN
    rederived: bool = True
    logged_version: int = 0
    logged_engine: str = ""
    version: int = 0  # The version of this build's decision rules.
    engine: str = __version__
    torn: Cut | None = None
    divergence: Divergence | None = None
    unfinished: list[str] = dataclasses.field(default_factory=list)
    host: str = ""
    rules: str = ""
    own: str = ""
    caveat: str = ""
    calls: int = 0
    left_over: list[str] = dataclasses.field(default_factory=list)

    @property
    def decider(self) -> str:
        """What derived the decisions of a recorded log, as a text."""
        if not self.own:
            return f"the rules of {self.rules}"
        return f"the scheduler of {self.rules}{'' if self.own == 'vllm' else f' ({self.own})'}"

    @property
    def ok(self) -> bool:
        return self.divergence is None


def readable(value: Any) -> Any:
    """Return an int32 column (bytes) as a list, so that people can compare it. Other values are returned
    unchanged.
    """
    if isinstance(value, bytes) and len(value) % 4 == 0 and len(value) <= 4096:
        return np.frombuffer(value, np.int32).tolist()
    return value
