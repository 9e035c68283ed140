"""Who brought a step down: its requests are tried again in halves, apart from all others.

A step that fails takes no blame to its requests unless one was alone in it. They become suspects: each
may run only in steps of at most half as many rows, suspects all of them, until it gained a token in
one; then it runs with everybody again. So a request that kills its steps is found in as many failures
as it takes to halve the batch, and the others lose time and nothing else.
"""

import numpy as np

from mmengine.core.decide.admission import admit_next
from mmengine.core.decide.encoder_parts import next_part
from mmengine.core.decide.running import schedule_running
from mmengine.core.state.columns import ReadOnlyArray
from mmengine.core.state.reading import RequestView
from mmengine.core.state.view import View
from mmengine.events import vocabulary as ev


def try_suspects(view: View) -> ev.StepDecision | None:
    """The next decision of a step while there are suspects. Where none of them can run, for want of what
    others hold, those others run in its place."""
    running = view.running
    suspect = np.array([view.requests_by_row[row].isolation_rows > 0 for row in running.tolist()], bool)
    if view.is_open and not view.requests_by_row[view.step_rows[0]].isolation_rows:
        return None  # the others' step; nobody new starts in it
    group = running[suspect]
    if len(group) and not view.is_open:
        event = schedule_running(view, group)
        if event is not None:
            return event
    size = len(group)
    admission = None
    if all(view.requests_by_row[row].isolation_rows > size for row in group.tolist()):
        admission = admit_next(view, lambda req_state: req_state.isolation_rows > size)
    waits = view.is_open or any(_holds_suspect(view, flight.rows) for flight in view.flights)
    if admission is not None or waits:
        return admission
    part = next_part(view) if view.num_large else None
    if part is not None and view.requests[part.request_id].isolation_rows:
        return part
    others = running[~suspect]
    if len(others):
        return schedule_running(view, others)
    return admit_next(view, _is_unsuspected)


def _holds_suspect(view: View, rows: ReadOnlyArray) -> bool:
    held = (view.requests_by_row[row] for row in rows.tolist())
    return any(req_state is not None and req_state.isolation_rows for req_state in held)


def _is_unsuspected(req_state: RequestView) -> bool:
    return not req_state.isolation_rows
