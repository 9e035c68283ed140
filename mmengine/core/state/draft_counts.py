"""Counts the drafts that a step computed and accepted."""

from typing import NamedTuple

import numpy as np

from mmengine.core.state.state import State
from mmengine.events import vocabulary as ev


class StepDrafts(NamedTuple):
    """The m rows of a step that had drafts. Each array is [m], int32 unless noted."""

    places: np.ndarray  # intp, indices into the rows that sampled
    drafters: np.ndarray  # the number of each row's drafter
    proposed: np.ndarray  # how many drafts were verified
    accepted: np.ndarray  # how many drafts were accepted; one more token follows them


class DraftCounts(NamedTuple):
    """Drafts and runs, counted for a drafter or a request. A run is one row's drafts in one step. It
    gives the accepted drafts and one more token.
    """

    runs: int = 0
    proposed: int = 0
    accepted: int = 0

    @property
    def length(self) -> float:
        """The mean number of accepted drafts in a run, without the token after them."""
        return self.accepted / max(self.runs, 1)

    def __str__(self) -> str:
        return (
            f"{self.accepted} of {self.proposed} drafts accepted, {self.length:.2f} a run and "
            f"{self.length + 1:.2f} with the token after them"
        )


def count_drafts(state: State, sampled: np.ndarray, event: ev.Executed) -> StepDrafts | None:
    """Return the drafts of the `sampled` rows (intp) in the step that `event` reports, or None if there were
    no drafts. Call this function before the event is applied to `state`.
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
    """Return `counts`, keyed by drafter, with a step's drafts added."""
    found = dict(counts)
    for number in np.unique(step.drafters).tolist():
        selected, old = step.drafters == number, found.get(number, DraftCounts())
        found[number] = DraftCounts(
            old.runs + int(np.count_nonzero(selected)),
            old.proposed + int(step.proposed[selected].sum()),
            old.accepted + int(step.accepted[selected].sum()),
        )
    return found
