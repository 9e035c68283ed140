"""Decides whether the scheduler may decide the next step while a step runs (`max_in_flight` 2).

The next step waits if the running step verifies or proposes drafts. The whole step waits, not only the rows
with drafts. Otherwise the batch would split into two halves that alternate, and each row would decode at half
the speed. A row that ends with its next token delays no step: the next step leaves out this row
(core/decide/running.py).

Rows with grammars do not wait. Only sampling needs the grammar's mask, and sampling starts after the previous
step's tokens are known. The exception is a grammar with `on_truncation` "close", because the row's text may
change after sampling.
"""

import numpy as np

from mmengine.core.state.columns import ReadOnlyArray
from mmengine.core.state.draft_arbiter import ALL_DRAFTERS, NO_DRAFTERS, NO_LIMITS
from mmengine.core.state.state import State
from mmengine.core.state.view import View
from mmengine.request import Request

AHEAD = "ahead"  # the step was decided while another step ran
# Reasons why a step was not decided while another step ran (values of a metric's label).
DRAFTS = "drafts"  # the previous step verified drafts, or returned drafts
GRAMMAR_ROWS = "forms"  # a row's answer is completed at its token limit (`on_truncation` "close")
BLOCKS = "blocks"  # a request must be preempted, but a preemption frees no blocks while a step runs
ALONE = "alone"  # no step was running, or no request could be scheduled
HOW = (AHEAD, DRAFTS, GRAMMAR_ROWS, BLOCKS, ALONE)


def draft_level_after(state: State | View, rows: ReadOnlyArray) -> int:
    """Return which drafters run after a step with `rows`. Call this before the step is dispatched."""
    config = state.config
    if not config.num_draft_tokens or config.drafts_for == "forms" and not _has_grammar_rows(state, rows):
        return NO_DRAFTERS
    return ALL_DRAFTERS if state.goodput is None else state.goodput.draft_level_after(len(rows))


def draft_room(view: View, rows: ReadOnlyArray) -> np.ndarray | None:
    """Return the draft limits for a step with `rows`, as in `StepPlan.draft_room`."""
    if view.config.drafts_for == "forms" and not _has_grammar_rows(view, rows):
        return NO_LIMITS
    return None if view.goodput is None else view.goodput.draft_limits_of(rows)


def waits_for(view: View) -> str:
    """Return why the next step must wait for the running step: DRAFTS, GRAMMAR_ROWS or "" (no wait)."""
    flight = view.flights[-1]
    if flight.draft_level != NO_DRAFTERS:
        return DRAFTS
    if view.verifies and view.scheduled_drafts[flight.rows].any():
        return DRAFTS
    if view.has_drafts and view.num_drafts[view.running].any():
        return DRAFTS  # a step with drafts runs alone
    if not view.runs_ahead_to[flight.sampled].all():
        return GRAMMAR_ROWS
    return ""


def runs_ahead_to(state: State, row: int, request: Request) -> int:
    """Return the token count from which the row waits for steps in flight; 0 if it always waits. For a row
    with a grammar, the count is negated, so that its sign shows the grammar.
    """
    end = int(state.max_total[row])
    if request.grammar is None:
        return end
    return 0 if request.closes else -end


def _has_grammar_rows(state: State | View, rows: ReadOnlyArray) -> bool:
    return bool((state.runs_ahead_to[rows] <= 0).any())
