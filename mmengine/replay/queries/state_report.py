"""Reports the whole state of an engine at a position in its log, as numbers and names."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from mmengine.core.state.digest import state_digest
from mmengine.core.state.request_state import SETTLED, RequestState
from mmengine.core.state.sessions import SessionState
from mmengine.core.state.state import State
from mmengine.replay.checked_log import CheckedLog
from mmengine.replay.findings import Findings
from mmengine.replay.timeline import open_log


class SessionReport(msgspec.Struct, frozen=True):
    """A session's state. `num_requests`: the number of its finished requests. `live`: the request in
    progress, or "".
    """

    session_id: str
    num_requests: int
    num_tokens: int
    num_media: int
    leased_blocks: int
    live: str


class StateReport(msgspec.Struct, frozen=True):
    """The whole state just before a step is decided, or at the log's end."""

    step: int
    running: list[dict[str, Any]]
    waiting: list[dict[str, Any]]
    blocks: dict[str, int]
    encoder: dict[str, int]
    host_blocks: dict[str, int]
    state_slots: dict[str, int]
    adapters: dict[str, int]
    leases: dict[str, int]
    sessions: list[SessionReport]
    in_flight: list[dict[str, Any]]
    free_rows: list[int]
    rows_being_left: list[int]
    num_arrived: int
    num_preempted: int
    digest: str


def state_report(folder: Path, number: int, findings: Findings | None = None) -> StateReport:
    """Return the state before step `number` was decided, or the state at the log's end if `number` is -1. If
    a decision cannot be applied to the state, the log counts as ended before this decision. `findings`: see
    CheckedLog. Raises LogError if the step has no decisions, or if the log is missing or damaged.
    """
    if number >= 0:
        return report_of(open_log(folder, findings).at(number).state)
    log = CheckedLog(folder, findings=findings)
    state = log.first_state()
    for record in log:
        with log.naming(record):
            log.apply(state, record.event)
    return report_of(state)


def report_of(state: State) -> StateReport:
    pool, cache = state.blocks, state.encoder
    cached = int(np.count_nonzero(pool.index.content[pool.free_list.order()] >= 0))
    return StateReport(
        step=state.step,
        running=[_running(state, row) for row in state.running.tolist()],
        waiting=[_waiting(req_state) for req_state in state.waiting],
        blocks={
            "total": pool.num_blocks - 1,
            "free": pool.num_free,
            "free_with_content": cached,
            "shared": int(np.count_nonzero(pool.references > 1)),
        },
        encoder={
            "capacity": cache.capacity,
            "used": cache.used,
            "idle": cache.idle_size,
            "items": len(cache.entries),
        },
        host_blocks={"total": state.config.swap_blocks, "free": len(state.free_host_blocks)},
        state_slots={
            "total": len(state.states.held),
            "held": len(state.states.held) - state.states.num_free,
            "kept": int(np.count_nonzero(state.states.content >= 0)),
        },
        adapters={
            "places": state.config.max_loras,
            "held": state.adapters.num_held,
            "there": len(state.adapters.cache.entries),
            "bytes": state.adapters.cache.used,
            "known": len(state.adapters.known),
        },
        leases={"total": state.config.most_leased, "held": state.sessions.num_leased},
        sessions=[_session(session) for session in state.sessions.all.values()],
        in_flight=[
            {"step": flight.step, "rows": flight.rows.tolist(), "num_tokens": flight.num_tokens}
            for flight in state.flights
        ],
        free_rows=sorted(state.free_rows),
        rows_being_left=sorted(state.leaving),
        num_arrived=state.num_arrived,
        num_preempted=state.num_preempted,
        digest=state_digest(state).hex(),
    )


def _session(session: SessionState) -> SessionReport:
    held = len(session.tokens), len(session.media), len(session.leased)
    return SessionReport(session.session_id, session.num_grown, *held, session.live)


def _running(state: State, row: int) -> dict[str, Any]:
    req_state = state.requests_by_row[row]
    return {
        "row": row,
        "request_id": req_state.request.request_id,
        "num_prompt_tokens": req_state.num_prompt,
        "num_tokens": int(state.num_tokens[row]),
        "num_computed_tokens": int(state.num_computed[row]),
        "num_cached_tokens": max(0, req_state.num_cached),
        "num_pending": int(state.num_pending[row]),
        "num_drafts": int(state.num_drafts[row]),
        "max_tokens": int(state.max_total[row]) - req_state.num_prompt,
        "blocks": state.block_table[row, : state.num_blocks[row]].tolist(),
        "held_media": sorted(req_state.held_media),
        "admitted_step": req_state.admitted_step,
        "failures": req_state.failures,
        **_windows(state, row),
        **({"state_slot": int(state.state_slot[row])} if state.config.num_state_slots else {}),
        **_adapter(req_state),
    }


def _windows(state: State, row: int) -> dict[str, object]:
    """Return the blocks that the row holds in each sliding-window group, and the index of each group's first
    held block.
    """
    if state.num_groups == 1:
        return {}
    first, last = state.windows.first_held[:, row].tolist(), int(state.num_blocks[row])
    tables = [table[start:last].tolist() for table, start in zip(state.windows.tables[:, row], first)]
    return {"window_blocks": tables, "window_starts": first}


def _adapter(req_state: RequestState) -> dict[str, str]:
    adapter = req_state.request.adapter
    return {} if adapter is None else {"adapter": adapter.name or adapter.digest.hex()[:12]}


def _waiting(req_state: RequestState) -> dict[str, Any]:
    return {
        "request_id": req_state.request.request_id,
        "num_prompt_tokens": req_state.num_prompt,
        "num_tokens": len(req_state.tokens),
        "preempted": req_state.preempted > 0,
        "num_swapped_tokens": req_state.num_swapped,
        "waits_for_grammar": req_state.waits_for_grammar,
        **({"waits_for_store": True} if req_state.store != SETTLED else {}),
        **_adapter(req_state),
        "group": req_state.request.group,
        "priority": req_state.request.priority,
        "cancelled": req_state.cancelled,
        "failures": req_state.failures,
    }
