"""The result of verifying a log: the counts, and the first divergence between the log and the derived
events.
"""

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

    For a digest, `columns` and `requests` say where the states differ, if the log contains enough data. An
    entry of `requests` is an id and a row, which is -1 for a waiting request. `agreed`: record and step of
    the last equal digest. `broken`: the rule of the state that the logged decision breaks, or None. `events`:
    the logged and the derived event, if known. `rows`: maps each running row to its request. `last_rows`: the
    previous step's rows.

    For a log that a host such as vLLM recorded, `rule` is the host's rule that most likely explains the
    difference. `outcomes` are then the logged and the derived outcome of the scheduling call.
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
        """The request in the logged event, or else in the derived event. "" if neither names a request."""
        names = (getattr(event, "request_id", "") for event in self.events)
        return next(filter(None, names), "")


@dataclass(slots=True)
class VerifyReport:
    """The result of verifying a log, which `verify` returns.

    `rederived` is False if the log was written under other decision rules, so that `logged_version` differs
    from `version`. A log of other rules is only folded, and its digests are compared. `unfinished`: the ids
    of requests without an end in the log. `begins_after`: the record number of the snapshot at which the
    verification started, or -1. `end`: how the log ends.

    A log that a host such as vLLM recorded has further fields. `host`: the engine that decided. `rules`: the
    rules that derived the decisions. `own`: the host's own scheduler that derived the decisions instead
    ("vllm" or MODULE:CLASS), or "". `calls`: the number of scheduling calls that agree. `caveat`: the reason
    why the decisions were not derived, or why they were derived with rules other than the host's. With a
    caveat, `rederived` is False. `left_over`: the requests that the rules schedule next at the log's end.
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
        """A text that says which rules or which scheduler derived a recorded log's decisions."""
        if not self.own:
            return f"the rules of {self.rules}"
        return f"the scheduler of {self.rules}{'' if self.own == 'vllm' else f' ({self.own})'}"

    @property
    def ok(self) -> bool:
        return self.divergence is None


def readable(value: Any) -> Any:
    """Return an int32 column (bytes) as a list, so that people can compare the values. Any other value is
    returned unchanged.
    """
    if isinstance(value, bytes) and len(value) % 4 == 0 and len(value) <= 4096:
        return np.frombuffer(value, np.int32).tolist()
    return value
