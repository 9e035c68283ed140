"""From a state to the body of a snapshot."""

from collections.abc import Callable

import numpy as np

from mmengine.core.snapshot.body import NAMES, PLAIN, Body, Known, Pool, Step
from mmengine.core.state.columns import COLUMNS
from mmengine.core.state.flight import Flight
from mmengine.core.state.prefix_index import NO_CONTENT
from mmengine.core.state.request_state import RequestState, queued_of
from mmengine.core.state.state import State
from mmengine.events import vocabulary as ev
from mmengine.request import Request


def body_of(state: State, started: ev.Started, sequence: int) -> Body:
    """Raises ValueError for a log of decision version 1."""
    places = {id(req_state.request): place for place, req_state in enumerate(state.requests.values())}
    gone: list[ev.Queued] = []

    def place_of(request: Request) -> int:
        if id(request) not in places:
            places[id(request)] = len(state.requests) + len(gone)
            gone.append(queued_of(request))
        return places[id(request)]

    held = np.flatnonzero(state.num_blocks).tolist()
    return Body(
        sequence=sequence,
        digest=state.digest(),
        started=started,
        plain={name: np.asarray(getattr(state, name)).item() for name in PLAIN},
        names={name: tuple(getattr(state, name)) for name in NAMES},
        suspects=tuple(state.suspects),
        columns={name: getattr(state, name).tobytes() for name in COLUMNS},
        tokens=tuple((row, _row_tokens(state, row)) for row in state.running.tolist()),
        tables=tuple((row, state.block_table[row, : state.num_blocks[row]].tobytes()) for row in held),
        requests=tuple(map(_known_of, state.requests.values())),
        open=_step_of(state, state.open_step(), place_of),
        flights=tuple(_step_of(state, flight, place_of) for flight in state.flights),
        gone=tuple(gone),
        waiting=tuple(req_state.request.request_id for req_state in state.waiting),
        free_rows=tuple(state.free_rows),
        running=_ints(state.running),
        last_rows=_ints(state.last_rows),
        pool=_pool_of(state),
        encoder=tuple((key, e.size, e.references, e.valid) for key, e in state.encoder.entries.items()),
        idle=tuple(state.encoder.idle),
        dropped=tuple(state.encoder.dropped),
        free_host_blocks=_ints(state.free_host_blocks),
        history=state.history.saved(),
        copies={name: tuple(map(_ints, parts)) for name, parts in state.step_copies.items()},
        made_room_for=state.made_room_for,
        leaving=tuple((row, tuple(keys)) for row, keys in state.leaving.items()),
        goodput=state.goodput.saved() if state.goodput is not None else None,
    )


def _row_tokens(state: State, row: int) -> bytes:
    """Known tokens and whatever stands behind them: drafts, or their placeholders."""
    behind = max(int(state.num_drafts[row]), int(state.scheduled_drafts[row]))
    return state.token_ids[row, : state.num_tokens[row] + behind].tobytes()


def _known_of(req_state: RequestState) -> Known:
    return Known(
        queued_of(req_state.request),
        req_state.arrival,
        req_state.tokens[req_state.num_prompt :].tobytes(),
        req_state.rank,
        req_state.row,
        req_state.preempted,
        req_state.num_cached,
        req_state.waits_for_grammar,
        _ints(req_state.host_blocks),
        req_state.num_swapped,
        req_state.admitted_step,
        req_state.idle_preemptions,
        req_state.failures,
        req_state.isolation_rows,
        req_state.cancelled,
        req_state.detail,
        tuple(sorted(req_state.held_media)),
    )


def _step_of(state: State, flight: Flight, place_of: Callable[[Request], int]) -> Step:
    # A request that ended gave its host blocks back already; its swap means nothing any more.
    swapped = [
        req_state
        for req_state in flight.swapped
        if state.requests.get(req_state.request.request_id) is req_state
    ]
    return Step(
        flight.step,
        _ints(flight.rows),
        _ints(flight.sampled),
        None if flight.num_computed is None else _ints(flight.num_computed),
        flight.num_tokens,
        tuple(map(_ints, flight.filled)),
        tuple((key, place_of(request), index) for key, request, index in flight.encoded),
        tuple(flight.gone),
        tuple(req_state.request.request_id for req_state in swapped),
        flight.asked,
    )


def _pool_of(state: State) -> Pool:
    pool, index = state.blocks, state.blocks.index
    blocks = np.flatnonzero(index.content != NO_CONTENT)
    stack, queue = pool.free_list.lines()
    return Pool(
        pool.references.tobytes(),
        stack.tobytes(),
        queue.tobytes(),
        _ints(blocks),
        *(column[blocks].tobytes() for column in index.columns()),
        {int(block): extra for block, extra in index.extra.items()},
        tuple(tuple(twins) for twins in index.twins.values()),
        index.next_content,
    )


def _ints(values: np.ndarray) -> bytes:
    return values.astype(np.int32).tobytes()
