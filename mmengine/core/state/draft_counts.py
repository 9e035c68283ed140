"""Counts the drafts that a step computed and accepted."""

from typing import NamedTuple

import numpy as np

from mmengine.core.state.state import State
from mmengine.events import vocabulary as ev


class StepDrafts(NamedTuple):
    """A step's m rows that had drafts: int32 [m] each."""

    places: np.ndarray  # intp, indices into the rows that sampled
    drafters: np.ndarray  # by number
    proposed: np.ndarray  # computed drafts
    accepted: np.ndarray  # accepted drafts, which precede the row's last token


class DraftCounts(NamedTuple):
    """The drafts and runs of a drafter or a request. A run is a row's drafts in one
    step; it gives the accepted drafts and one more token.
    """

    runs: int = 0
    proposed: int = 0
    accepted: int = 0

    @property
    def length(self) -> float:
        """A run's accepted drafts, without the token after them."""
        return self.accepted / max(self.runs, 1)

    def __str__(self) -> str:
        return (
            f"{self.accepted} of {self.proposed} drafts accepted, {self.length:.2f} a run and "
            f"{self.length + 1:.2f} with the token after them"
        )


def count_drafts(state: State, sampled: np.ndarray, event: ev.Executed) -> StepDrafts | None:
    """Return the drafts in the `sampled` rows (intp) in the step that `event` reports, or None without
    drafts. The event must not be applied yet.
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
    """Add a step's drafts to `counts`, which are by drafter."""
    found = dict(counts)
    for number in np.unique(step.drafters).tolist():
        selected, old = step.drafters == number, found.get(number, DraftCounts())
        found[number] = DraftCounts(
            old.runs + int(np.count_nonzero(selected)),
            old.proposed + int(step.proposed[selected].sum()),
            old.accepted + int(step.accepted[selected].sum()),
        )
    return found
