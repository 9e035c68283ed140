"""The named invariants of a state, which hold between any two events. Tests, `mmengine log verify
--invariants` and `mmengine log minimize` use them.

Each counts the rows, requests and steps again, and compares the result with the pools' counters.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mmengine.core.state.adapters import digest_of
from mmengine.core.state.columns import NEVER, RUNS_ON
from mmengine.core.state.state import State


class BrokenInvariant(NamedTuple):
    """A broken invariant: its `name`, and a `text` that says how the state breaks it."""

    name: str
    text: str


def find_broken(state: State, name: str = "") -> BrokenInvariant | None:
    """Return the first broken invariant, or None. `name`: check only this invariant."""
    for each in [name] if name else INVARIANTS:
        text = next(INVARIANTS[each](state), None)
        if text is not None:
            return BrokenInvariant(each, text)
    return None


def _references(state: State) -> Iterator[str]:
    """Check that the reference counts follow from the block tables."""
    held = _held_blocks(state)
    wrong = np.flatnonzero(held != state.blocks.references)
    if len(wrong):
        block = int(wrong[0])
        yield (
            f"block {block} has {int(state.blocks.references[block])} references, but is in "
            f"{int(held[block])} block tables"
        )
    if held[0]:
        yield "a row holds block 0, the dummy"


def _held_blocks(state: State) -> np.ndarray:
    held = np.zeros(state.blocks.num_blocks, np.int32)
    for row in (*state.running.tolist(), *state.leaving):
        np.add.at(held, state.block_table[row, : state.num_blocks[row]], 1)
    for name in state.fetching:
        np.add.at(held, state.requests[name].fetch_blocks, 1)
    np.add.at(held, state.sessions.leased(), 1)
    return held


def _blocks(state: State) -> Iterator[str]:
    """Check that each block is held or free, once."""
    free = state.blocks.free_list.order()
    if len(free) != state.blocks.num_free or len(np.unique(free)) != len(free):
        yield f"the free list has {len(free)} entries, not {state.blocks.num_free} different blocks"
    expected = np.flatnonzero(_held_blocks(state)[1:] == 0) + 1
    if not np.array_equal(np.sort(free), expected):
        lost = np.setxor1d(free, expected)
        yield f"{len(lost)} blocks are neither held nor free, or both; the first is block {int(lost[0])}"


def _host_blocks(state: State) -> Iterator[str]:
    """Check that each block in the host pool is free or holds a request's KV, once."""
    swapped = [req_state.host_blocks for req_state in state.requests.values()]
    placed = np.sort(np.concatenate([*swapped, state.free_host_blocks]))
    if not np.array_equal(placed, np.arange(state.config.swap_blocks)):
        yield f"{len(placed)} host blocks are held or free; there are {state.config.swap_blocks}"


def _rows(state: State) -> Iterator[str]:
    """Check that each row is running, free or leaving, and that each request waits or runs."""
    placed = sorted([*state.running.tolist(), *state.free_rows, *state.leaving])
    if placed != list(range(state.config.max_num_seqs)):
        yield f"{len(placed)} rows are running, free or leaving; there are {state.config.max_num_seqs}"
    waiting = Counter(map(id, state.waiting))
    for name, req_state in state.requests.items():
        if waiting[id(req_state)] != (req_state.row < 0):
            times = waiting[id(req_state)]
            yield f"request {name!r} is {times} times in the queue and has row {req_state.row}"
        if req_state.row >= 0 and state.requests_by_row[req_state.row] is not req_state:
            yield f"row {req_state.row} of request {name!r} belongs to another"


def _state_slots(state: State) -> Iterator[str]:
    """Check that each row holds its own state slot, and that the others are free."""
    slots = state.states
    rows = [*state.running.tolist(), *state.leaving]
    held = np.sort(state.state_slot[rows]) if state.config.num_state_slots else np.zeros(0, np.int32)
    if not np.array_equal(held, np.flatnonzero(slots.held)) or slots.num_free != len(slots.held) - len(held):
        yield (
            f"rows hold the state slots {held.tolist()}, but {np.flatnonzero(slots.held).tolist()} count as "
            f"held and {slots.num_free} of {len(slots.held)} as free"
        )


def _sessions(state: State) -> Iterator[str]:
    """Check that all leases are within their limit, and that a live request belongs to a single session."""
    config, sessions = state.config, state.sessions
    ending = any(session.is_settled for session in sessions.all.values())
    if sessions.num_leased > config.most_leased and not ending:
        yield f"sessions lease {sessions.num_leased} blocks; the limit is {config.most_leased}"
    live = {session.live: session for session in sessions.all.values() if session.live}
    if live != sessions.of_request:
        yield f"sessions have the requests {sorted(live)}, but {sorted(sessions.of_request)} are counted"


def _queue(state: State) -> Iterator[str]:
    """Check that waiting requests are in the policy's order, and rows in the order of their admission."""
    ranks = [state.policy.rank(req_state) for req_state in state.waiting]
    for place, (first, second) in enumerate(pairwise(ranks)):
        if second < first:
            name, other = (state.waiting[place + n].request.request_id for n in (0, 1))
            yield f"request {name!r} with rank {first} waits before {other!r} with rank {second}"
    running = state.running.tolist()
    since = [state.requests_by_row[row].admitted_step for row in running]
    if since != sorted(since):
        yield f"rows {running} run in this order, but were admitted in steps {since}"


def _tenants(state: State) -> Iterator[str]:
    """Check that each live request belongs to a tenant, and each request without a row to its queue."""
    tenants = list(state.tenants.all.values())
    queued = sorted(id(req_state) for tenant in tenants for req_state in tenant.waiting)
    if queued != sorted(id(req_state) for req_state in state.requests.values() if req_state.row < 0):
        yield f"the queues of {len(tenants)} tenants have {len(queued)} requests, but others wait"
    if (live := sum(tenant.num_live for tenant in tenants)) != len(state.requests):
        yield f"{len(tenants)} tenants have {live} live requests; there are {len(state.requests)}"


def _budgets(state: State) -> Iterator[str]:
    """Check that a step stays within its budgets for tokens, rows and embeddings, and counts them right."""
    config, rows = state.config, state.step_rows
    num_tokens = int(state.scheduled[rows].sum())
    if state.tokens_left < 0 or (state.is_open and num_tokens != config.token_budget - state.tokens_left):
        yield (
            f"the step's rows compute {num_tokens} of {config.token_budget} tokens, but "
            f"{state.tokens_left} are counted as left"
        )
    if len(np.unique(rows)) < len(rows) or len(rows) > config.max_num_seqs:
        yield f"the step has the rows {rows.tolist()}; there are {config.max_num_seqs}"
    part = state.step_part.key if state.step_part is not None else None  # The part has a budget of its own.
    sizes = [request.media[index].num_embeds for key, request, index in state.step_encoded if key != part]
    # Under vLLM's rules a preempted request's items are encoded, although their budget was given back.
    uncounted = sum(sizes) > config.encoder_budget - state.encoder_left and not config.compat
    if state.encoder_left < 0 or uncounted:
        yield (
            f"the step encodes {sum(sizes)} of {config.encoder_budget} embeddings, but "
            f"{state.encoder_left} are counted as left"
        )
    over = np.flatnonzero(np.maximum(state.num_drafts, state.scheduled_drafts) > config.num_draft_tokens)
    if len(over):
        yield f"row {int(over[0])} has more drafts than {config.num_draft_tokens} (num_draft_tokens)"


def _computed(state: State) -> Iterator[str]:
    """Check that rows compute known tokens, into blocks that they hold."""
    rows = state.running
    req_state = state.num_tokens[rows] + state.num_pending[rows] + state.scheduled_drafts[rows]
    room = state.num_blocks[rows] * state.block_size
    for most, text in ((req_state, "tokens are known"), (room, "slots are held")):
        over = np.flatnonzero(state.num_computed[rows] > most)
        if len(over):
            row = int(rows[over[0]])
            yield f"row {row} has computed {int(state.num_computed[row])} tokens; {int(most[over[0]])} {text}"


def _flights(state: State) -> Iterator[str]:
    """Check that no row in a dispatched step is free, and that pending tokens are counted."""
    if len(state.flights) > state.config.max_in_flight:
        yield f"{len(state.flights)} steps are in flight"
    named, pending = np.zeros_like(state.in_flight), np.zeros_like(state.num_pending)
    for flight in state.flights:
        named[flight.rows] += 1
        pending[flight.sampled] += 1
    if not (np.array_equal(named, state.in_flight) and np.array_equal(pending, state.num_pending)):
        yield "the rows' counts of steps in flight are wrong"
    if free := [row for row in state.free_rows if named[row]]:
        yield f"row {free[0]} is free, but a step in flight names it"
    if left := [row for row in state.leaving if not named[row]]:
        yield f"row {left[0]} is leaving, but no step in flight names it"


def _media(state: State) -> Iterator[str]:
    """Check that a row holds the encoder outputs that its step reads. Between steps, a row whose position
    lies inside an item must hold this item's output.
    """
    for row in state.running[state.ended[state.running] == RUNS_ON].tolist():
        req_state, computed = state.requests_by_row[row], int(state.num_computed[row])
        before = computed - int(state.scheduled[row])
        for index, item in enumerate(req_state.request.media):
            if not any(start < computed and before < start + length for start, length in item.runs):
                continue
            entry = state.encoder.entries.get(req_state.media_keys[index])
            if index not in req_state.held_media or (entry is not None and not entry.valid):
                yield (
                    f"row {row} computed tokens {before} to {computed}, inside item {index} of "
                    f"{req_state.request.request_id!r}, but does not hold its encoder output"
                )


def _encoder(state: State) -> Iterator[str]:
    """Check that the encoder cache fits, and that its reference counts equal the running requests'."""
    cache = state.encoder
    size = sum(entry.size for entry in cache.entries.values())
    if not cache.used == size <= cache.capacity:
        yield f"the encoder cache counts {cache.used} embeddings and holds {size} (capacity {cache.capacity})"
    idle = sum(entry.size for entry in cache.entries.values() if not entry.references)
    if cache.idle_size != idle:
        yield f"the encoder cache counts {cache.idle_size} unreferenced embeddings; there are {idle}"
    holders = Counter(key for keys in state.leaving.values() for key in keys)
    for row in state.running.tolist():
        req_state = state.requests_by_row[row]
        holders.update(req_state.media_keys[index] for index in req_state.held_media)
        if (state.release_at[row] == NEVER) != (not req_state.held_media):
            yield f"row {row} holds {len(req_state.held_media)} items and releases at {state.release_at[row]}"
    for key, entry in cache.entries.items():
        if entry.references != holders[key]:
            yield (
                f"encoder entry {key.hex()[:8]} has {entry.references} references, but "
                f"{holders[key]} running requests hold it"
            )
        if (key in cache.idle) != (entry.references == 0):
            yield f"encoder entry {key.hex()[:8]} has {entry.references} references; its idle flag is wrong"
    if gone := holders.keys() - cache.entries.keys():
        yield f"{len(gone)} items held by requests are not in the encoder cache"


def _adapters(state: State) -> Iterator[str]:
    """Check that adapters fit their budgets, and are held by the rows that compute with them."""
    pool, config = state.adapters, state.config
    wanted = {
        row: adapter.digest
        for row in state.running.tolist()
        if (adapter := state.requests_by_row[row].request.adapter) is not None
    }
    there = {row: digest for row, digest in pool.of_row.items() if row not in state.leaving}
    if there != wanted:
        yield f"rows {sorted(there)} hold adapters, but rows {sorted(wanted)} have requests with an adapter"
    holders = Counter(pool.of_row.values())
    counted = {key: entry.references for key, entry in pool.cache.entries.items() if entry.references}
    if counted != dict(holders):
        yield f"{len(counted)} adapters count as held, but rows hold {len(holders)}"
    if pool.num_held > config.max_loras:
        yield f"{pool.num_held} adapters are held, more than max_loras {config.max_loras}"
    if pool.cache.used > config.lora_bytes:
        yield f"adapters take {pool.cache.used} bytes, more than lora_bytes {config.lora_bytes}"
    if pool.nameless:
        asked = {digest_of(req_state.request.adapter) for req_state in state.requests.values()}
        named = {loaded.adapter.digest for loaded in pool.known.values()}
        if wrong := pool.nameless.keys() - (asked - named):
            yield f"{len(wrong)} adapters are held as nameless, but have a name or no request"


INVARIANTS: dict[str, Callable[[State], Iterator[str]]] = {
    "encoder": _encoder,
    "media": _media,
    "references": _references,
    "blocks": _blocks,
    "host_blocks": _host_blocks,
    "rows": _rows,
    "state_slots": _state_slots,
    "adapters": _adapters,
    "sessions": _sessions,
    "queue": _queue,
    "tenants": _tenants,
    "budgets": _budgets,
    "computed": _computed,
    "flights": _flights,
}
