"""The named invariants of the engine's state. Every invariant holds between any two events. Tests, `mmengine
log verify --invariants` and `mmengine log minimize` check the invariants.

An invariant counts rows, requests and steps again, and compares the results with the state's counters.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mmengine.core.state.columns import CRASHED, LOST, RUNS_ON
from mmengine.core.state.prefix_index import NO_CONTENT
from mmengine.core.state.state import State
from mmengine.replay.block_invariants import (
    broken_blocks,
    broken_host_blocks,
    broken_references,
    broken_windows,
)
from mmengine.replay.cache_invariants import broken_adapters, broken_encoder, broken_media, broken_parts
from mmengine.replay.row_invariants import (
    broken_atomic_runs,
    broken_chunks,
    broken_ends,
    broken_grammars,
    broken_hits,
    broken_overlap,
    broken_whole_prompt,
    broken_writes,
)


class BrokenInvariant(NamedTuple):
    """A broken invariant. `text`: how the state breaks the invariant."""

    name: str
    text: str


def find_broken(state: State, name: str = "") -> BrokenInvariant | None:
    """Return the first broken invariant, or None. `name`: check only this invariant. An invariant that raises
    an error counts as broken.
    """
    for each in [name] if name else INVARIANTS:
        try:
            text = next(INVARIANTS[each](state), None)
        except (IndexError, KeyError, ValueError, AttributeError, TypeError) as error:
            text = f"the state is too damaged to be checked ({type(error).__name__}: {str(error)[:100]})"
        if text is not None:
            return BrokenInvariant(each, text)
    return None


def _rows(state: State) -> Iterator[str]:
    """Check that each row is running, free or leaving. Check that each request waits or has a row."""
    placed = sorted([*state.running.tolist(), *state.free_rows, *state.leaving])
    if placed != list(range(state.config.num_rows)):
        yield (
            f"{len(set(placed))} different rows are listed {len(placed)} times as running, free or leaving; "
            f"each of the {state.config.num_rows} rows must be listed once"
        )
    waiting = Counter(map(id, state.waiting))
    for name, req_state in state.requests.items():
        if waiting[id(req_state)] != (req_state.row < 0):
            times = waiting[id(req_state)]
            place = f"row {req_state.row}" if req_state.row >= 0 else "no row"
            yield (
                f"request {name!r} is in the waiting queue {times} times and has {place}; it must either "
                "wait there once or have a row"
            )
        if req_state.row >= 0 and state.requests_by_row[req_state.row] is not req_state:
            yield f"request {name!r} has row {req_state.row}, but this row does not have the request"


def _state_slots(state: State) -> Iterator[str]:
    """Check that each row has its own slot for its recurrent state. Check that only free slots store states
    for prefix cache hits.
    """
    slots = state.states
    rows = [*state.running.tolist(), *state.leaving]
    held = np.sort(state.state_slot[rows]) if state.config.num_state_slots else np.zeros(0, np.int32)
    if not np.array_equal(held, np.flatnonzero(slots.held)) or slots.num_free != len(slots.held) - len(held):
        yield (
            f"rows hold the state slots {held.tolist()}, but the pool counts "
            f"{np.flatnonzero(slots.held).tolist()} as held, and {slots.num_free} of its {len(slots.held)} "
            "slots as free"
        )
    for content, slot in slots.kept():
        if slots.held[slot] or slots.content[slot] != content:
            yield (
                f"prefix hits may start from the kept state in slot {slot}, but this slot belongs to a row "
                "or contains another state"
            )


def _sessions(state: State) -> Iterator[str]:
    """Check session leases: the blocks that sessions keep between requests. The leases must stay within their
    limit, and the leased blocks must contain the sessions' tokens. Each live request belongs to at most one
    session.
    """
    config, sessions = state.config, state.sessions
    ending = any(session.is_settled for session in sessions.all.values())
    if sessions.num_leased > config.most_leased and not ending:
        limit = config.most_leased
        yield f"sessions lease {sessions.num_leased} blocks; the limit is {limit} (session_blocks)"
    live = {session.live: session for session in sessions.all.values() if session.live}
    if live != sessions.of_request:
        names = live.keys() | sessions.of_request.keys()
        wrong = sorted(name for name in names if live.get(name) is not sessions.of_request.get(name))
        yield f"the sessions and the table from request to session disagree about the requests {wrong}"
    index, size = state.blocks.index, state.block_size
    for session in sessions.all.values():
        if len(session.leased) == 0 or session.live:
            continue
        if len(session.leased) > len(session.tokens) // size:
            yield (
                f"session {session.session_id!r} leases {len(session.leased)} blocks, but its "
                f"{len(session.tokens)} tokens fill only {len(session.tokens) // size}"
            )
            continue
        tokens = session.tokens[: len(session.leased) * size].reshape(-1, size)
        cached = index.content[session.leased] != NO_CONTENT
        if (index.tokens_of(session.leased)[cached, :size] != tokens[cached]).any():
            yield f"session {session.session_id!r} leases a block with the KV of other tokens than its own"


def _queue(state: State) -> Iterator[str]:
    """Check that waiting requests are in the scheduling policy's order. Check that rows are in the order of
    their admission.
    """
    ranks = [state.policy.rank(req_state) for req_state in state.waiting]
    for place, (first, second) in enumerate(pairwise(ranks)):
        if second < first:
            name, other = (state.waiting[place + n].request.request_id for n in (0, 1))
            yield (
                f"request {name!r} (rank {first}) waits ahead of request {other!r} (rank {second}), but the "
                "lower rank comes first"
            )
    running = state.running.tolist()
    since = [state.requests_by_row[row].admitted_step for row in running]
    if since != sorted(since):
        yield (
            f"the running rows {running} are not in the order of their admission; they were admitted in the "
            f"steps {since}"
        )


def _tenants(state: State) -> Iterator[str]:
    """Check that each live request belongs to a tenant. Check that each request without a row is in its
    tenant's queue.
    """
    tenants = list(state.tenants.all.values())
    queued = sorted(id(req_state) for tenant in tenants for req_state in tenant.waiting)
    waiting = sorted(id(req_state) for req_state in state.requests.values() if req_state.row < 0)
    if queued != waiting:
        yield (
            f"the queues of {len(tenants)} tenants have {len(queued)} requests, which are not exactly the "
            f"{len(waiting)} requests without a row"
        )
    if (live := sum(tenant.num_live for tenant in tenants)) != len(state.requests):
        yield f"{len(tenants)} tenants count {live} live requests, but there are {len(state.requests)}"


def _budgets(state: State) -> Iterator[str]:
    """Check that a step stays within its budgets for tokens, rows and embeddings. Check that the step's
    counters match its rows.
    """
    config, rows = state.config, state.step_rows
    num_tokens = int(state.scheduled[rows].sum())
    if state.tokens_left < 0 or (state.is_open and num_tokens != config.token_budget - state.tokens_left):
        yield (
            f"the step's rows compute {num_tokens} of {config.token_budget} tokens (token_budget), but the "
            f"step counts {state.tokens_left} tokens as left"
        )
    if len(np.unique(rows)) < len(rows) or len(rows) > config.max_num_seqs:
        yield (
            f"the step has the rows {rows.tolist()}; it must have each row only once, and at most "
            f"{config.max_num_seqs} rows (max_num_seqs)"
        )
    # Pieces from a large media item have a separate budget and are not counted here.
    part = state.step_part.key if state.step_part is not None else None
    sizes = [request.media[index].num_embeds for key, request, index in state.step_encoded if key != part]
    # Under vLLM's rules, a preempted request returns its encoder budget, but its items are still encoded.
    uncounted = sum(sizes) > config.encoder_budget - state.encoder_left and not config.compat
    if state.encoder_left < 0 or uncounted:
        yield (
            f"the step encodes {sum(sizes)} of {config.encoder_budget} embeddings (encoder_budget), but "
            f"counts {state.encoder_left} embeddings as left"
        )
    num_drafts = np.maximum(state.num_drafts, state.scheduled_drafts)
    for row in np.flatnonzero(num_drafts > config.num_draft_tokens)[:1].tolist():
        limit = config.num_draft_tokens
        yield f"row {row} has {int(num_drafts[row])} drafts; the limit is {limit} (num_draft_tokens)"


def _computed(state: State) -> Iterator[str]:
    """Check that rows compute only known tokens, and write KV only to their own blocks."""
    # Rows whose step was lost or crashed start again, so they are excluded.
    rows = state.running[~np.isin(state.ended[state.running], (LOST, CRASHED))]
    known = state.num_tokens[rows] + state.num_pending[rows] + state.scheduled_drafts[rows]
    room = state.num_blocks[rows] * state.block_size
    for most, text in ((known, "tokens are known"), (room, "KV slots are in its blocks")):
        over = np.flatnonzero(state.num_computed[rows] > most)
        if len(over):
            row = int(rows[over[0]])
            num_computed = int(state.num_computed[row])
            yield f"row {row} has computed {num_computed} tokens, but only {int(most[over[0]])} {text}"
    # The next token needs the logits of the last known token. So an idle row must have a known token that is
    # not computed yet.
    idle = (state.scheduled[rows] + state.in_flight[rows] == 0) & (state.ended[rows] == RUNS_ON)
    idle &= (state.num_tokens[rows] < state.max_total[rows]) & (
        state.num_computed[rows] >= state.num_tokens[rows]
    )
    for row in rows[idle][:1].tolist():
        yield (
            f"row {row} has computed {int(state.num_computed[row])} of {int(state.num_tokens[row])} known "
            "tokens, so no token is left whose logits give the next token"
        )


def _flights(state: State) -> Iterator[str]:
    """Check that no row in a dispatched step is free. Check the counters of steps in flight and pending
    tokens.
    """
    if len(state.flights) > state.config.max_in_flight:
        limit = state.config.max_in_flight
        yield f"{len(state.flights)} steps are in flight; the limit is {limit} (max_in_flight)"
    named, pending = np.zeros_like(state.in_flight), np.zeros_like(state.num_pending)
    for flight in state.flights:
        named[flight.rows] += 1
        pending[flight.sampled] += 1
    for row in np.flatnonzero((named != state.in_flight) | (pending != state.num_pending))[:1].tolist():
        yield (
            f"row {row} counts {int(state.in_flight[row])} steps in flight and {int(state.num_pending[row])} "
            f"pending tokens, but {int(named[row])} steps in flight contain it and {int(pending[row])} "
            "sample a token for it"
        )
    if free := [row for row in state.free_rows if named[row]]:
        yield f"row {free[0]} is free, but a step in flight contains it"
    if left := [row for row in state.leaving if not named[row]]:
        yield f"row {left[0]} is leaving, but no step in flight contains it"


INVARIANTS: dict[str, Callable[[State], Iterator[str]]] = {
    "encoder": broken_encoder,
    "media": broken_media,
    "references": broken_references,
    "blocks": broken_blocks,
    "host_blocks": broken_host_blocks,
    "rows": _rows,
    "state_slots": _state_slots,
    "parts": broken_parts,
    "adapters": broken_adapters,
    "sessions": _sessions,
    "queue": _queue,
    "tenants": _tenants,
    "budgets": _budgets,
    "chunks": broken_chunks,
    "atomic_runs": broken_atomic_runs,
    "whole_prompt": broken_whole_prompt,
    "computed": _computed,
    "hits": broken_hits,
    "windows": broken_windows,
    "writes": broken_writes,
    "grammars": broken_grammars,
    "ends": broken_ends,
    "overlap": broken_overlap,
    "flights": _flights,
}
