"""Counts the drafts that steps verified and accepted, for statistics."""

from typing import NamedTuple

import numpy as np

from mmengine.core.state.state import State
from mmengine.events import vocabulary as ev


class StepDrafts(NamedTuple):
    """The m rows that had drafts in a step. The arrays have the shape [m], and dtype int32 unless a comment
    says otherwise.
    """

    places: np.ndarray  # intp, the rows' indices among the rows that sampled
    drafters: np.ndarray  # each row's drafter, as a number
    proposed: np.ndarray  # number of drafts that were verified
    accepted: np.ndarray  # number of drafts that were accepted


class DraftCounts(NamedTuple):
    """Counts of drafts and runs, for a drafter or a request. A run is one row's drafts in one step."""

    runs: int = 0
    proposed: int = 0
    accepted: int = 0

    @property
    def length(self) -> float:
        """The mean number of accepted drafts in a run."""
        return self.accepted / max(self.runs, 1)

    def __str__(self) -> str:
        return (
            f"{self.accepted} of {self.proposed} drafts accepted, {self.length:.2f} a run and "
            f"{self.length + 1:.2f} with the token after them"
        )


def count_drafts(state: State, sampled: np.ndarray, event: ev.Executed) -> StepDrafts | None:
    """Return the drafts in the step of `event`, or None without drafts. `sampled`: the rows that sampled,
    intp. Must be called before `state` applies the event.
    """
    if event.counts is None:
        return None
    proposed = state.scheduled_drafts[sampled]
    places = np.flatnonzero(proposed)
    if not len(places):
        return None
    accepted = np.frombuffer(event.counts, np.int32)[places] - 1
    return StepDrafts(places, state.drafter[sampled[places]], proposed[places], accepted)


def add_drafts(counts: dict[int, DraftCounts], step: StepDrafts) -> dict[int, DraftCounts]:
    """Return `counts` (drafter number -> counts) with a step's drafts added."""
    found = dict(counts)
    for number in np.unique(step.drafters).tolist():
        selected, old = step.drafters == number, found.get(number, DraftCounts())
        found[number] = DraftCounts(
            old.runs + int(np.count_nonzero(selected)),
            old.proposed + int(step.proposed[selected].sum()),
            old.accepted + int(step.accepted[selected].sum()),
        )
    return found
