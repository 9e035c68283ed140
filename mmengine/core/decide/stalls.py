"""Nothing waits for ever: when the loop goes on without getting anywhere, it says so.

Two kinds. "no progress": requests are there, no step could be decided, and nothing from outside is
awaited; no later step would differ. "thrash": a request was preempted `thrash_limit` times in a row
without a token gained in between; it may still end, but the pool is too small for what runs.
"""

from collections.abc import Iterator

from mmengine.core.state.request_state import SETTLED
from mmengine.core.state.view import View
from mmengine.events import vocabulary as ev

NO_PROGRESS, THRASH = "no progress", "thrash"


def find_stalls(view: View) -> Iterator[ev.Stalled]:
    """To be asked when the step is decided."""
    for name in list(view.thrashing):
        count = view.requests[name].idle_preemptions
        yield ev.Stalled(
            THRASH, name, f"preempted {count} times without a token in between; {_holders(view)}"
        )
    idle = not view.is_open and not view.flights
    requests = view.requests.values()
    if not idle or any(req_state.store != SETTLED for req_state in requests):
        return  # a store that is awaited has a deadline, and others may wait for what it sends
    if any(not req_state.waits_for_grammar for req_state in requests):
        yield ev.Stalled(NO_PROGRESS, "", _holders(view))


def _holders(view: View) -> str:
    """What there is, and who holds it."""
    return (
        f"{len(view.running)} requests run, {len(view.waiting)} wait, {view.blocks.num_free} of "
        f"{view.blocks.num_blocks - 1} blocks are free, {len(view.free_rows)} rows are free, the encoder "
        f"cache holds {view.encoder.used} of {view.encoder.capacity}, {view.encoder.idle_size} of it idle"
    )
