"""A planted bug: requests finish one step after their stop."""

from mmengine.core import engine
from mmengine.core.decide.completion import complete
from mmengine.core.state.columns import STOPPED

_seen = {}  # the step of each request's stop


def late(view):
    events = []
    for event in complete(view):
        req_state = view.requests.get(event.request_id)
        stopped = req_state is not None and req_state.row >= 0 and view.ended[req_state.row] == STOPPED
        if not stopped or _seen.setdefault((id(view), event.request_id), view.step) < view.step:
            events.append(event)
    return events


engine.complete = late
