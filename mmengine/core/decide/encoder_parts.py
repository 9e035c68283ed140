"""Items that take more encoder work than a step may: one at a time, a part in each step.

A part is the last decision of its step, beside whoever computes tokens there, and opens one where nobody
does. It is computed for whoever stands at the item and cannot go on without: a row, or a request whose first
chunk would begin with it. With the last part the features are in the encoder cache, and the next step goes
on.
"""

from collections.abc import Callable

from mmengine.core.decide.admission import large_item_of_first
from mmengine.core.decide.encoder_draft import EncoderDraft
from mmengine.core.state.flight import work_done
from mmengine.core.state.reading import RequestView
from mmengine.core.state.view import View
from mmengine.events import vocabulary as ev

_May = Callable[[RequestView], bool]


def next_part(view: View) -> ev.Encoded | None:
    """What the open step computes of an item, once all else is decided; None where nothing is in pieces, or
    there is no room for the features."""
    part = view.part
    found: tuple[RequestView, int] | None = None
    if part is not None:
        found = view.requests[part.request_id], part.item
    if view.suspects and not (found and found[0].isolation_rows):
        found = _first_large(view, lambda req_state: req_state.isolation_rows > 0) or found
    if found is None:
        found = _first_large(view, lambda req_state: True)
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
    """A suspect is alone with its part; nobody joins a step in which suspects are tried."""
    if not view.suspects or not view.is_open:
        return True
    return not (req_state.isolation_rows or view.requests_by_row[int(view.step_rows[0])].isolation_rows)


def _first_large(view: View, may: _May) -> tuple[RequestView, int] | None:
    """The first item in pieces that a request which `may` stands at: rows in order, then who waits."""
    running = view.running
    ahead = bool(view.config.lookahead_tokens)
    at_media = running[view.next_media[running] <= view.num_computed[running] + ahead]
    for row in at_media.tolist():
        req_state = view.requests_by_row[row]
        if may(req_state):
            draft = EncoderDraft(view)
            draft.cut(req_state, row, int(view.num_computed[row]), 1)
            if draft.large is not None:
                return draft.large
    return large_item_of_first(view, may)
