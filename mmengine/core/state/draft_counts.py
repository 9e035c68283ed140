"""How many drafts a step computed, and how many of them it kept."""

from typing import NamedTuple

import numpy as np

from mmengine.core.state.state import State
from mmengine.events import vocabulary as ev


class StepDrafts(NamedTuple):
    """The m rows of a step that had drafts: int32 [m] each."""

    places: np.ndarray  # intp, into the rows that sampled
    drafters: np.ndarray  # by number
    proposed: np.ndarray  # drafts that were computed
    accepted: np.ndarray  # of these, those that stand before the row's last token


class DraftCounts(NamedTuple):
    """Of one drafter, or of one request: its drafts, and the runs (a row's drafts in a step) they came in.
    Each run gives the drafts that are accepted, and one token more."""

    runs: int = 0
    proposed: int = 0
    accepted: int = 0

    @property
    def length(self) -> float:
        """Accepted drafts of a run; with the token behind them it is one more."""
        return self.accepted / max(self.runs, 1)

    def __str__(self) -> str:
        return (
            f"{self.accepted} of {self.proposed} drafts accepted, {self.length:.2f} a run and "
            f"{self.length + 1:.2f} with the token behind them"
        )


def count_drafts(state: State, sampled: np.ndarray, event: ev.Executed) -> StepDrafts | None:
    """What rows `sampled` (intp) had in the step that `event`, which is not applied yet, reports; None where
    none had drafts."""
    if event.counts is None:
        return None
    proposed = state.scheduled_drafts[sampled]
    places = np.flatnonzero(proposed)
    if not len(places):
        return None
    accepted = np.frombuffer(event.counts, np.int32)[places] - 1
    return StepDrafts(places, state.drafter[sampled[places]], proposed[places], accepted)


def add_drafts(counts: dict[int, DraftCounts], step: StepDrafts) -> dict[int, DraftCounts]:
    """`counts` of each drafter with those of another step."""
    found = dict(counts)
    for number in np.unique(step.drafters).tolist():
        selected, old = step.drafters == number, found.get(number, DraftCounts())
        found[number] = DraftCounts(
            old.runs + int(np.count_nonzero(selected)),
            old.proposed + int(step.proposed[selected].sum()),
            old.accepted + int(step.accepted[selected].sum()),
        )
    return found
