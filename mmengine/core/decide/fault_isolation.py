"""Finds the request that makes steps fail, by running a failed step's requests again in smaller groups.

A failed step's requests become suspects. A suspect runs only together with other suspects, in steps with at
most half as many rows as the failed step. A suspect that gains a token is cleared, and runs with all requests
again. A failure counts only against a request that is alone in the step. A faulty request is found after
about log2(rows) further failed steps, and the other requests lose only time.
"""

import numpy as np

from mmengine.core.decide.admission import Admission
from mmengine.core.decide.encoder_parts import next_part
from mmengine.core.decide.running import RunningRows
from mmengine.core.state.columns import ReadOnlyArray
from mmengine.core.state.read_only import RequestView
from mmengine.core.state.view import View
from mmengine.events import vocabulary as ev


def next_trial(view: View, admission: Admission, running_rows: RunningRows) -> ev.StepDecision | None:
    """Return a step's next decision while there are suspects.

    If the suspects lack rows or blocks that other requests hold, the other requests run instead.
    """
    running = view.running
    suspect = np.array([view.requests_by_row[row].isolation_rows > 0 for row in running.tolist()], bool)
    if view.is_open and not view.requests_by_row[view.step_rows[0]].isolation_rows:
        return None  # the open step's rows are no suspects, so no suspect may join the step
    group = running[suspect]
    if len(group) and not view.is_open:
        event = running_rows.schedule(view, group)
        if event is not None:
            return event
    size = len(group)
    admitted = None
    if all(view.requests_by_row[row].isolation_rows > size for row in group.tolist()):
        admitted = admission.admit_next(view, lambda req_state: req_state.isolation_rows > size)
    waits = view.is_open or any(_has_suspect(view, flight.rows) for flight in view.flights)
    if admitted is not None or waits:
        return admitted
    part = next_part(view, admission) if view.num_large else None
    if part is not None and view.requests[part.request_id].isolation_rows:
        return part
    others = running[~suspect]
    if len(others):
        return running_rows.schedule(view, others)
    return admission.admit_next(view, _is_unsuspected)


def _has_suspect(view: View, rows: ReadOnlyArray) -> bool:
    requests = (view.requests_by_row[row] for row in rows.tolist())
    return any(req_state is not None and req_state.isolation_rows for req_state in requests)


def _is_unsuspected(req_state: RequestView) -> bool:
    return not req_state.isolation_rows
