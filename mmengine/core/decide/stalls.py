"""Finds stalls: the engine's loop runs but makes no progress.

There are two kinds. "no progress": there are requests, but no step can be scheduled, and no pending result or
event could change this. "thrash": a request was preempted `thrash_limit` times in a row without getting a
token. This request may still finish, but the KV pool is too small for the running requests.
"""

from collections.abc import Iterator

from mmengine.core.state.request_state import SETTLED
from mmengine.core.state.view import View
from mmengine.events import vocabulary as ev

NO_PROGRESS, THRASH = "no progress", "thrash"


def find_stalls(view: View) -> Iterator[ev.Stalled]:
    """Yield the current stalls. Call this function after a step was decided."""
    for name in list(view.thrashing):
        count = view.requests[name].idle_preemptions
        yield ev.Stalled(
            THRASH, name, f"preempted {count} times without a token in between; {_holders(view)}"
        )
    idle = not view.is_open and not view.flights
    requests = view.requests.values()
    if not idle or any(req_state.store != SETTLED for req_state in requests):
        return  # a step is in progress, or a request waits for a block store until a deadline
    if any(not req_state.waits_for_grammar for req_state in requests):
        yield ev.Stalled(NO_PROGRESS, "", _holders(view))


def _holders(view: View) -> str:
    """Return a clause that states how full the rows, the blocks and the encoder cache are."""
    return (
        f"{len(view.running)} requests run, {len(view.waiting)} wait, {view.blocks.num_free} of "
        f"{view.blocks.num_blocks - 1} blocks are free, {len(view.free_rows)} rows are free, the encoder "
        f"cache holds {view.encoder.used} of {view.encoder.capacity}, {view.encoder.idle_size} of it idle"
    )
