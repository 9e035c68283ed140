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
    """The first difference between the log and the derived events. `recent`: the last observations before it.

    If a digest differs: `columns` and `requests` say where the states differ, if the log contains enough
    data. `requests` are pairs (id, row), with row -1 for a waiting request. `agreed`: record number and step
    number of the last digest that was equal. `broken`: the rule that the logged decision breaks, or
    None. `events`: the logged and the derived event, if known. `rows`: maps each running row to its request.
    `last_rows`: the previous step's rows.

    If a host such as vLLM recorded the log: `rule` is the host's rule that most likely explains the
    difference. `outcomes` are the logged and the derived result of the scheduling call.
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
        """The id of the request in the logged event, or else in the derived event, or ""."""
        names = (getattr(event, "request_id", "") for event in self.events)
        return next(filter(None, names), "")


@dataclass(slots=True)
class VerifyReport:
    """The result of `verify`.

    `rederived` is False if the log was written under another version of the decision rules
    (`logged_version`). The events are then only applied to the state, and the digests are compared.
    `unfinished`: the ids of requests that have not ended. `begins_after`: the record number of the snapshot
    at which the verification started, or -1. `end`: how the log ends.

    If a host such as vLLM recorded the log: `host` is the engine that decided, and `rules` names the rules
    that derived the decisions. `own`: the scheduler class that derived the decisions instead of mmengine's
    implementation ("vllm" or MODULE:CLASS), or "". `calls`: the number of scheduling calls that agree.
    `caveat`: why the host's rules did not derive the decisions; `rederived` is then False. `left_over`: the
    requests that the rules would schedule after the log's end.
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
        """The name of the rules, or of the scheduler, that derived a recorded log's decisions."""
        if not self.own:
            return f"the rules of {self.rules}"
        return f"the scheduler of {self.rules}{'' if self.own == 'vllm' else f' ({self.own})'}"

    @property
    def ok(self) -> bool:
        return self.divergence is None


def readable(value: Any) -> Any:
    """Return an int32 column (bytes) as a list, and any other value unchanged."""
    if isinstance(value, bytes) and len(value) % 4 == 0 and len(value) <= 4096:
        return np.frombuffer(value, np.int32).tolist()
    return value
