"""Decides on leases: KV blocks that an idle session keeps for its next request.

A lease begins or grows when a request of the session ends. Leases never delay a request: leased blocks are
used before any request waits or is preempted. A block without a lease stays in the prefix cache until it is
overwritten.
"""

from collections.abc import Iterator

import numpy as np

from mmengine.core.state.columns import RUNS_ON, STOPPED
from mmengine.core.state.read_only import RequestView, SessionView
from mmengine.core.state.sessions import NO_BLOCKS
from mmengine.core.state.view import View
from mmengine.events import vocabulary as ev

NO_FREE_BLOCKS, LIMIT = "no free blocks", "session_blocks"


def next_lease(view: View) -> ev.Leased | ev.LeaseTaken | None:
    """Return the next change of a lease, or None. Apply each returned event before the next call.

    Call this function before `complete` in completion.py, which ends requests and frees their blocks.
    """
    for session, req_state in _ending(view):
        wanted = _wanted(view, req_state)
        held = session.leased
        same = min(len(held), len(wanted))
        differ = np.flatnonzero(np.asarray(held[:same]) != wanted[:same])
        num_kept = int(differ[0]) if len(differ) else same
        if num_kept < max(len(held), len(wanted)):
            return ev.Leased(session.session_id, num_kept, wanted[num_kept:].tobytes())
    over = view.sessions.num_leased - view.config.most_leased if len(view.sessions) else 0
    if over <= 0:
        return None
    oldest = view.sessions.by_age()[0]
    return ev.LeaseTaken(oldest.session_id, max(0, len(oldest.leased) - over), LIMIT)


def _ending(view: View) -> Iterator[tuple[SessionView, RequestView]]:
    """Yield (session, request) for each session whose request is about to end with the reason "stop" or
    "length".
    """
    for name, session in view.sessions.of_request.items():
        req_state = view.requests.get(name)
        if req_state is None or req_state.row < 0 or req_state.cancelled or session.is_settled:
            continue
        row = req_state.row
        full = view.ended[row] == RUNS_ON and view.num_tokens[row] >= view.max_total[row]
        if view.ended[row] == STOPPED or (full and is_computed(view, req_state)):
            yield session, req_state


def is_computed(view: View, req_state: RequestView) -> bool:
    """Return whether a prefill-only request is completely computed, or True for any other request."""
    row = req_state.row
    whole = view.num_computed[row] >= view.num_tokens[row] and not view.scheduled[row]
    return not req_state.request.is_prefill or bool(whole and not view.in_flight[row])


def _wanted(view: View, req_state: RequestView) -> np.ndarray:
    """Return the row's full blocks, up to the limit for one session. With `block_groups`, return no blocks,
    because these blocks alone would allow no prefix hit. A hit also needs blocks that the row has released,
    or blocks of other groups.
    """
    if view.config.block_groups:
        return NO_BLOCKS
    count = min(int(view.num_filled[req_state.row]), view.config.most_leased)
    return np.asarray(view.block_table[req_state.row, :count]).copy()


def lease_to_take(view: View, num_blocks: int, hits: np.ndarray) -> ev.LeaseTaken | None:
    """Return the next lease to shorten in order to free `num_blocks` more blocks. Return None if all leases
    together cannot free so many blocks. `hits` (int32): blocks that must not be freed, because the caller is
    about to use the blocks.
    """
    leased = view.sessions.leased()
    if not len(leased):
        return None
    times = np.bincount(leased, minlength=view.blocks.num_blocks)
    held_alone = (times > 0) & (np.asarray(view.blocks.references) == times)
    held_alone[hits] = False
    if int(np.count_nonzero(held_alone)) < num_blocks:
        return None
    for session in view.sessions.by_age():
        blocks = np.asarray(session.leased)
        last = held_alone[blocks] & (times[blocks] == 1)
        if last.any() or held_alone[blocks].any():
            freed = np.cumsum(last[::-1])
            enough = np.flatnonzero(freed >= num_blocks)
            count = int(enough[0]) + 1 if len(enough) else len(blocks)
            return ev.LeaseTaken(session.session_id, len(blocks) - count, NO_FREE_BLOCKS)
    return None
