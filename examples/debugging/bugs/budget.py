"""A request that starts may use the whole token budget, not what running rows left of it."""

from mmengine.core.decide import admission

_first_chunk = admission.first_chunk


def first_chunk(view, req_state, start):
    length = _first_chunk(view, req_state, start)
    left = len(req_state.tokens) - start.num_computed
    return length and min(left, view.config.token_budget)


admission.first_chunk = first_chunk
