"""A planted bug: a row's first draft counts as computed although all the row's drafts are rejected."""

import numpy as np

from mmengine.core.fold import evolve

SETTINGS = {"num_draft_tokens": 3}
_executed = evolve.apply_executed


def executed(state, event):
    sampled = state.sampled_rows()
    drafts = state.scheduled_drafts[sampled].copy()
    _executed(state, event)
    if event.counts is not None:
        rejected = sampled[(np.frombuffer(event.counts, np.int32) == 1) & (drafts > 0)]
        state.num_computed[rejected] += 1


evolve.apply_executed = executed
