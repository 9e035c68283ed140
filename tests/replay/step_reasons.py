"""Computes the wait reasons for a single step."""

from mmengine.replay import Step
from mmengine.replay.queries.reasons import Reason, Reasons


def reasons_of(step: Step) -> list[Reason]:
    """Return a reason for each request that gets no tokens in this step; [] if the log ends within the step.

    Advances the step to its logged end. Raises CorruptLog for an impossible step.
    """
    reasons = Reasons(step.view)
    for event in step.follow():
        reasons.before(event)
    return reasons.at_end() if step.is_whole else []
