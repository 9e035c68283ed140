"""Reports a step: its batch, its budgets, its outcome, and the reasons why other requests got no tokens."""

from pathlib import Path
from typing import Any

import msgspec

from mmengine.core.state.blocks import hit_tokens
from mmengine.core.state.state import State
from mmengine.events import vocabulary as ev
from mmengine.replay.checked_log import CheckedLog
from mmengine.replay.findings import Findings
from mmengine.replay.queries.reasons import Reason, Reasons
from mmengine.replay.queries.wall_clock import WallClock
from mmengine.replay.timeline import Step, open_log


class BatchRow(msgspec.Struct, frozen=True):
    """A row in a step.

    The request has `known` tokens. The row computes the tokens [first, first + num_tokens), of which the last
    `num_drafts` are drafts. `start` is "admitted" or "swapped in" for a row that starts in this step,
    otherwise "".
    """

    row: int
    request_id: str
    first: int
    num_tokens: int
    num_drafts: int
    known: int
    samples: bool
    start: str = ""
    num_cached_tokens: int = 0
    encode: tuple[int, ...] = ()  # Indices of the request's media items that the step encodes.


class Budget(msgspec.Struct, frozen=True):
    used: int
    total: int


class StepReport(msgspec.Struct, frozen=True):
    """The report on a step.

    `budgets`: the budgets after the step's decisions, by name. `preempted`: for each preemption, the
    preempted request, the mode, and the request that needed the blocks, or "". `outcome`: "executed",
    "failed", or "" if the log does not contain the outcome. `mono_ns`: time since the log's first record. If
    the log may lack the step's last decisions, `is_whole` is False and `waits` is empty.

    `part`: the part of a media item that the step encodes, or None: (request, the item's index, the part's
    start and end, the item's size). Start, end and size are in units of encoder work. `wall_ns`: the Unix
    time of the first decision, or 0 if unknown.
    """

    step: int
    mono_ns: int
    batch: list[BatchRow]
    waits: list[Reason]
    budgets: dict[str, Budget]
    preempted: list[tuple[str, str, str]]
    num_evicted: int
    is_whole: bool
    outcome: str = ""
    outcome_ns: int = 0
    device_ns: int = 0
    error: str = ""
    part: tuple[str, int, int, int, int] | None = None
    wall_ns: int = 0


def step_report(folder: Path, number: int, findings: Findings | None = None) -> StepReport:
    """Return the report on step `number`. `findings`: see CheckedLog. Raises LogError if the step has no
    decisions, and `verify`'s errors.
    """
    step = open_log(folder, findings).at(number)
    reasons, starts, preempted = Reasons(step.view), {}, []
    num_evicted = 0
    for event in step.follow():
        reasons.before(event)
        num_evicted += len(getattr(event, "evict", ()))
        match event:
            case ev.Admitted(row=row):
                starts[row] = event
            case ev.Preempted(row=row, request_id=name, mode=mode):
                starts.pop(row, None)
                other = step.state.requests_by_row[event.for_row] if event.for_row >= 0 else None
                preempted.append((name, mode, other.request.request_id if other is not None else ""))
    began, outcome = _outcome(folder, number)
    return StepReport(
        step=number,
        mono_ns=step.record.mono_ns - began,
        batch=_batch(step.state, starts),
        waits=reasons.at_end() if step.is_whole else [],
        budgets=_budgets(step),
        preempted=preempted,
        num_evicted=num_evicted,
        is_whole=step.is_whole,
        part=_part(step.state),
        wall_ns=WallClock(folder).at(step.record),
        **outcome,
    )


def _batch(state: State, starts: dict[int, ev.Admitted]) -> list[BatchRow]:
    sampled = set(state.open_step().sampled.tolist())
    rows = []
    for row in state.step_rows.tolist():
        name, count = state.requests_by_row[row].request.request_id, int(state.scheduled[row])
        start = starts.get(row)
        encode = tuple(
            index for _, request, index in state.step_encoded if request is state.requests_by_row[row].request
        )
        rows.append(
            BatchRow(
                row=row,
                request_id=name,
                first=int(state.num_computed[row]) - count,
                num_tokens=count,
                num_drafts=int(state.scheduled_drafts[row]),
                known=int(state.num_tokens[row] + state.num_pending[row]),
                samples=row in sampled,
                start="" if start is None else "swapped in" if start.swap_in else "admitted",
                num_cached_tokens=0 if start is None else hit_tokens(state, start),
                encode=encode,
            )
        )
    return rows


def _part(state: State) -> tuple[str, int, int, int, int] | None:
    part = state.step_part
    if part is None:
        return None
    work = state.requests[part.request_id].media_work[part.item]
    return part.request_id, part.item, part.start, part.until, work


def _budgets(step: Step) -> dict[str, Budget]:
    state, config = step.state, step.state.config
    blocks, rows = config.num_blocks - 1, config.max_num_seqs
    return {
        "tokens": Budget(config.token_budget - state.tokens_left, config.token_budget),
        "rows": Budget(rows - len(state.free_rows), rows),
        "KV blocks": Budget(blocks - state.blocks.num_free, blocks),
        "encoder budget": Budget(config.encoder_budget - state.encoder_left, config.encoder_budget),
        "encoder work": Budget(config.encoder_piece - state.work_left, config.encoder_piece),
        "encoder cache": Budget(state.encoder.used, state.encoder.capacity),
        "state slots": Budget(len(state.states.held) - state.states.num_free, len(state.states.held)),
        "host blocks": Budget(config.swap_blocks - len(state.free_host_blocks), config.swap_blocks),
    }


def _outcome(folder: Path, number: int) -> tuple[int, dict[str, Any]]:
    """Return the time of the log's first record, and the fields of StepReport that describe the outcome.

    A failed step also ends the later steps in flight. The outcome may therefore be the FAILED event for an
    earlier step.
    """
    began, dispatched = -1, False
    for record in CheckedLog(folder):
        began = record.mono_ns if began < 0 else began
        match record.event:
            case ev.Executed(device_ns=device_ns) if record.step == number:
                when = record.mono_ns - began
                return began, {"outcome": "executed", "outcome_ns": when, "device_ns": device_ns}
            case ev.Failed(error=error) if record.step == number or dispatched:
                return began, {"outcome": "failed", "outcome_ns": record.mono_ns - began, "error": error}
            case ev.Dispatched() if record.step == number:
                dispatched = True
    return began, {}
