"""A planted bug: a request that is admitted gets the whole token budget instead of the remaining budget."""

from mmengine.core.decide.admission import Admission

_first_chunk = Admission.first_chunk


def first_chunk(self, view, req_state, start):
    length = _first_chunk(self, view, req_state, start)
    left = len(req_state.tokens) - start.num_computed
    return length and min(left, view.config.token_budget)


Admission.first_chunk = first_chunk
