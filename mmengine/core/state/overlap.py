"""Whether the next step is decided while one runs, where `max_in_flight` allows it.

It waits for a step that leaves open what the next one computes: how many drafts are kept, which drafts come
behind it. The whole step waits, not only the rows in question: left out of every other step, they would
decode at half the speed, and rows that came at different times would end up in two halves of a batch that
take turns, each as long as the whole. A row that ends with its next token has nothing to wait for, and is
left out by itself (core/decide/running.py).

A grammar must see a row's token before it says which may be next, but only to sample: the forward does not
depend on that, and an executor samples behind it when the step before is read. Whose text is completed within
its budget waits all the same: what it says is changed once it is sampled, and until then nobody goes on.
"""

import numpy as np

from mmengine.core.state.columns import ReadOnlyArray
from mmengine.core.state.draft_arbiter import ALL_DRAFTERS, NO_DRAFTERS, NO_LIMITS
from mmengine.core.state.state import State
from mmengine.core.state.view import View
from mmengine.request import Request

AHEAD = "ahead"  # the step was decided while another one ran
# Why it was not, as the metric names it.
DRAFTS = "drafts"  # the step before verified drafts, or brought some
GRAMMAR_ROWS = "forms"  # a row's text is completed within its budget, by what it had sampled
BLOCKS = "blocks"  # somebody had to give way, and nobody's blocks are free while a step runs
ALONE = "alone"  # nothing ran, or nobody had anything to compute beside what ran
HOW = (AHEAD, DRAFTS, GRAMMAR_ROWS, BLOCKS, ALONE)


def draft_level_after(state: State | View, rows: ReadOnlyArray) -> int:
    """Up to which number drafters may draft behind a step of `rows`, decided before it is dispatched."""
    config = state.config
    if not config.num_draft_tokens or config.drafts_for == "forms" and not _has_grammar_rows(state, rows):
        return NO_DRAFTERS
    return ALL_DRAFTERS if state.goodput is None else state.goodput.draft_level_after(len(rows))


def draft_room(view: View, rows: ReadOnlyArray) -> np.ndarray | None:
    """As in StepPlan, for a step of `rows`."""
    if view.config.drafts_for == "forms" and not _has_grammar_rows(view, rows):
        return NO_LIMITS
    return None if view.goodput is None else view.goodput.draft_limits_of(rows)


def waits_for(view: View) -> str:
    """Why no step is decided before the one in flight is back: DRAFTS or FORMS; "" where it can be."""
    flight = view.flights[-1]
    if flight.draft_level != NO_DRAFTERS:
        return DRAFTS
    if view.verifies and view.scheduled_drafts[flight.rows].any():
        return DRAFTS
    if view.has_drafts and view.num_drafts[view.running].any():
        return DRAFTS  # a step that verifies some is a whole one, too
    if not view.runs_ahead_to[flight.sampled].all():
        return GRAMMAR_ROWS
    return ""


def runs_ahead_to(state: State, row: int, request: Request) -> int:
    """The column of that name, for `request` in `row`."""
    end = int(state.max_total[row])
    if request.grammar is None:
        return end
    return 0 if request.closes else -end


def _has_grammar_rows(state: State | View, rows: ReadOnlyArray) -> bool:
    return bool((state.runs_ahead_to[rows] <= 0).any())
