"""Schedules the encoding of large media items. A large item exceeds the encoder work that one step may do, so
it is encoded in parts over several steps. Only one item is encoded at a time.

The scheduler decides on a part at the end of a step, after all rows that compute tokens. Only an item that
blocks a request is encoded in parts. An item blocks a running request whose next token needs the item, or a
waiting request whose first chunk needs the item. The last part puts the item's features into the encoder
cache. The request continues in the next step.
"""

from mmengine.core.decide.admission import Admission, MayStart
from mmengine.core.state.flight import work_done
from mmengine.core.state.read_only import RequestView
from mmengine.core.state.view import View
from mmengine.events import vocabulary as ev


def next_part(view: View, admission: Admission) -> ev.Encoded | None:
    """Return the part that the current step computes. Called after all other decisions in the step.

    Returns None if no request waits for a large item, if the part must not join this step, or if the encoder
    cache has no space for the features.
    """
    part = view.part
    found: tuple[RequestView, int] | None = None
    if part is not None:
        found = view.requests[part.request_id], part.item
    if view.suspects and not (found and found[0].isolation_rows):
        found = _first_large(view, admission, lambda req_state: req_state.isolation_rows > 0) or found
    if found is None:
        found = _first_large(view, admission, lambda req_state: True)
    if found is None or not _may_join(view, found[0]):
        return None
    req_state, index = found
    work, done = req_state.media_work[index], work_done(part, req_state.media_keys[index])
    until = min(work, done + view.config.encoder_piece)
    evict: list[bytes] | None = []
    if until == work:
        evict = view.encoder.evictions_for(req_state.request.media[index].num_embeds, set(), 0)
    if evict is None:
        return None
    return ev.Encoded(req_state.request.request_id, index, until, tuple(evict))


def _may_join(view: View, req_state: RequestView) -> bool:
    """Return whether the request's part may join the current step. Suspects (requests that may have caused a
    failed step, see fault_isolation.py) never share a step with other requests.
    """
    if not view.suspects or not view.is_open:
        return True
    return not (req_state.isolation_rows or view.requests_by_row[int(view.step_rows[0])].isolation_rows)


def _first_large(view: View, admission: Admission, may_start: MayStart) -> tuple[RequestView, int] | None:
    """Return the first request that cannot continue without a large item, and the item's index. Running
    requests come first, then waiting requests. `may_start` selects the candidates."""
    running = view.running
    ahead = bool(view.config.lookahead_tokens)
    at_media = running[view.next_media[running] <= view.num_computed[running] + ahead]
    for row in at_media.tolist():
        req_state = view.requests_by_row[row]
        if may_start(req_state):
            draft = admission.draft(view)
            draft.cut(req_state, row, int(view.num_computed[row]), 1)
            if draft.large is not None:
                return draft.large
    return admission.first_large_item(view, may_start)
