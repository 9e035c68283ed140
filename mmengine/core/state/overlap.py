"""Decides whether the next step is decided while a step runs, if `max_in_flight` allows it.

The next step waits if it depends on the running step's result: the number of accepted drafts, or the drafts
that follow. The whole step waits, not only the rows in question. Rows that were left out of every other step
would decode at half the speed, and the batch would split into two halves that alternate, each as slow as the
whole. A row that ends with its next token does not wait; it is left out by itself (core/decide/running.py).

A grammar needs a row's token to mask the next one, but only for sampling. The forward pass does not depend on
the token, and an executor samples after it has read the step before. A row whose text must be completed
within its budget waits anyway: its text changes after sampling, and the row must not continue before that.
"""

import numpy as np

from mmengine.core.state.columns import ReadOnlyArray
from mmengine.core.state.draft_arbiter import ALL_DRAFTERS, NO_DRAFTERS, NO_LIMITS
from mmengine.core.state.state import State
from mmengine.core.state.view import View
from mmengine.request import Request

AHEAD = "ahead"  # the step was decided while another step ran
# Reasons why it was not, as the metric names them.
DRAFTS = "drafts"  # the step before verified drafts, or returned some
GRAMMAR_ROWS = "forms"  # a row's text is completed within its budget, depending on its sampled token
BLOCKS = "blocks"  # a request must be preempted, and no blocks become free while a step runs
ALONE = "alone"  # no step ran, or no request could be computed beside the running step
HOW = (AHEAD, DRAFTS, GRAMMAR_ROWS, BLOCKS, ALONE)


def draft_level_after(state: State | View, rows: ReadOnlyArray) -> int:
    """Return the draft level after a step with `rows`, decided before it is dispatched."""
    config = state.config
    if not config.num_draft_tokens or config.drafts_for == "forms" and not _has_grammar_rows(state, rows):
        return NO_DRAFTERS
    return ALL_DRAFTERS if state.goodput is None else state.goodput.draft_level_after(len(rows))


def draft_room(view: View, rows: ReadOnlyArray) -> np.ndarray | None:
    """Return the limits of StepPlan.draft_room for a step with `rows`."""
    if view.config.drafts_for == "forms" and not _has_grammar_rows(view, rows):
        return NO_LIMITS
    return None if view.goodput is None else view.goodput.draft_limits_of(rows)


def waits_for(view: View) -> str:
    """Return why no step is decided before the running step is back, DRAFTS or GRAMMAR_ROWS, or ""."""
    flight = view.flights[-1]
    if flight.draft_level != NO_DRAFTERS:
        return DRAFTS
    if view.verifies and view.scheduled_drafts[flight.rows].any():
        return DRAFTS
    if view.has_drafts and view.num_drafts[view.running].any():
        return DRAFTS  # steps with and without drafts are not mixed
    if not view.runs_ahead_to[flight.sampled].all():
        return GRAMMAR_ROWS
    return ""


def runs_ahead_to(state: State, row: int, request: Request) -> int:
    """Return the value of the column `runs_ahead_to` for `request` in `row`."""
    end = int(state.max_total[row])
    if request.grammar is None:
        return end
    return 0 if request.closes else -end


def _has_grammar_rows(state: State | View, rows: ReadOnlyArray) -> bool:
    return bool((state.runs_ahead_to[rows] <= 0).any())
