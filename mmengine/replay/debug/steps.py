"""Explains why requests are not in a step, counts accepted drafts, and compares a step's decisions with this
build's rules.
"""

import numpy as np

from mmengine.core.decide.deciders import scheduler_of
from mmengine.core.fold.evolve import evolve
from mmengine.core.state.request_state import NO_ROW
from mmengine.core.state.state import State
from mmengine.core.state.view import View
from mmengine.events import vocabulary as ev
from mmengine.replay.debug.navigator import Navigator
from mmengine.replay.debug.search import Steps, search_back
from mmengine.replay.debug.views import Block, Cell, Table, Text
from mmengine.replay.queries.reasons import Reason, Reasons
from mmengine.replay.timeline import is_scheduling

RECENT_RECORDS = 1024  # `drafts_view` counts drafts in this many records before the navigator's position.
MAX_DECISIONS = 100_000  # Maximum number of decisions in a step.


def queue_view(navigator: Navigator) -> Table:
    """Return the waiting requests, with the reason why each is not in the open or next step."""
    state = navigator.state
    step, reasons = waits(navigator) if len(state.waiting) else (-1, {})
    rows: list[tuple[Cell, ...]] = []
    for place, req_state in enumerate(state.waiting):
        name, known = req_state.request.request_id, len(req_state.tokens)
        reason = reasons.get(name)
        why = f"admitted in step {step}" if reason is None else reason.sentence()
        kind = "" if reason is None else reason.kind
        before = "yes" if req_state.preempted else ""
        rows.append((place, name, req_state.num_prompt, known, before, kind, why))
    header = ("place", "request", "prompt", "tokens", "preempted", "waits for", "why")
    note = f"reasons are those of step {step}" if rows else "no request waits"
    if not reasons and rows and step < 0:
        note = "this build has no rules for this log, so the reasons are unknown"
        rows = [(*row[:-2], "", "") for row in rows]
    return Table("queue", header, rows, note)


def waits(navigator: Navigator) -> tuple[int, dict[str, Reason]]:
    """Return (step number, reasons) for the open step, or for the next step if no step is open. Each request
    that is not in the step has a reason. The number is -1 if this build's rules do not apply.
    """
    state, start = navigator.state, navigator.position
    if state.is_open or state.preempted_in_step:
        start = max(navigator.first, search_back(navigator, Steps(), start + 1)[0])
    reasons: Reasons | None = None
    step = -1
    try:
        for cursor in navigator.walk(start):
            record = cursor.record
            decides = record is not None and is_scheduling(cursor.state, record.event)
            if reasons is None and (decides or record is None):
                reasons, step = Reasons(View(cursor.state)), cursor.state.step
            if reasons is None:
                continue
            if record is None or not decides or record.step != step:
                return step, {each.request_id: each for each in reasons.at_end()}
            reasons.before(record.event)
    except Exception:  # This build may lack the rules, or the state may be inconsistent.
        return -1, {}
    return step, {}


def drafts_view(navigator: Navigator) -> Table:
    """Return a table with each live request's current drafts, and the counts of verified and accepted drafts
    in the last RECENT_RECORDS records.
    """
    start = max(navigator.first, navigator.position - RECENT_RECORDS)
    counts: dict[str, list[int]] = {}
    has_drafts = navigator.config.num_draft_tokens or navigator.started.host
    for cursor in navigator.walk(start) if has_drafts else ():
        if cursor.position >= navigator.position or cursor.record is None:
            break
        if isinstance(cursor.record.event, ev.Executed):
            _count(cursor.state, cursor.record.event, counts)
    state = navigator.state
    rows: list[tuple[Cell, ...]] = []
    for name, req_state in state.requests.items():
        tried, accepted = counts.get(name, (0, 0))
        row = req_state.row
        now = 0 if row == NO_ROW else int(state.num_drafts[row])
        verified = 0 if row == NO_ROW else int(state.scheduled_drafts[row])
        if now or verified or tried:
            share = f"{100 * accepted / tried:.0f} %" if tried else ""
            drafter: Cell = int(state.drafter[row]) if row != NO_ROW and now else ""
            rows.append((name, now, drafter, verified, tried, accepted, share))
    header = ("request", "drafts", "drafter", "in the open step", "drafted", "accepted", "")
    tried, accepted = (sum(each[place] for each in counts.values()) for place in (0, 1))
    share = f", {100 * accepted / tried:.1f} %" if tried else ""
    note = f"last {navigator.position - start} records: {accepted} of {tried} drafts accepted{share}"
    return Table("drafts", header, rows, note)


def _count(state: State, event: ev.Executed, counts: dict[str, list[int]]) -> None:
    rows, drafts = state.sampled_rows(), state.sampled_drafts()
    given = np.ones(len(rows), np.int32)
    if event.counts is not None:
        given = np.frombuffer(event.counts, np.int32)
    for row, tried, count in zip(rows.tolist(), drafts.tolist(), given.tolist(), strict=True):
        held = state.requests_by_row[row]
        if held is not None and tried:
            total = counts.setdefault(held.request.request_id, [0, 0])
            total[0] += tried
            total[1] += max(0, count - 1)


def decisions_here(navigator: Navigator) -> tuple[int, list[ev.Event], list[ev.Event], str]:
    """Return (number, logged decisions, this build's decisions, error) for the open or next step. Both lists
    begin with the first decision at or after the navigator's position. The error is the exception that this
    build raised, as text, or "".
    """
    logged: list[ev.Event] = []
    step = -1
    start = navigator.position
    for cursor in navigator.walk(navigator.position):
        record = cursor.record
        decides = record is not None and is_scheduling(cursor.state, record.event)
        if record is None or step >= 0 and (not decides or record.step != step):
            break
        if decides:
            start, step = (cursor.position, record.step) if step < 0 else (start, step)
            logged.append(record.event)
    decided: list[ev.Event] = []
    cursor = next(navigator.walk(start))
    scheduler, view = scheduler_of(navigator.config), View(cursor.state)
    try:
        while len(decided) < MAX_DECISIONS and (event := scheduler.schedule(view)) is not None:
            decided.append(event)
            evolve(cursor.state, event)
    except Exception as error:
        return step, logged, decided, f"{type(error).__name__}: {error}"
    return step, logged, decided, ""


def decision_table(navigator: Navigator) -> Block:
    """Return a table that compares the log's and this build's decisions for the open or next step."""
    step, logged, decided, error = decisions_here(navigator)
    if step < 0:
        return Text(["no step is decided after this position"])
    rows: list[tuple[Cell, ...]] = []
    for place in range(max(len(logged), len(decided))):
        pair = [
            f"{type(each[place]).__name__} {_about(each[place])}".rstrip() if place < len(each) else ""
            for each in (logged, decided)
        ]
        same = place < min(len(logged), len(decided)) and logged[place] == decided[place]
        rows.append((*pair, "" if same else "differs"))
    note = f"this build raises {error}" if error else "as logged" if logged == decided else ""
    return Table(f"step {step}", ("logged", "this build", ""), rows, note)


def _about(event: object) -> str:
    name = getattr(event, "request_id", "")
    if name:
        return str(name)
    rows = getattr(event, "rows", None)
    return f"{len(rows) // 4} rows" if isinstance(rows, bytes) else ""
