"""The reasons of one step of a log, as the tests ask for them."""

from mmengine.replay import Step
from mmengine.replay.queries.reasons import Reason, Reasons


def reasons_of(step: Step) -> list[Reason]:
    """Why each request that is not in the step got nothing in it. The step moves on to its end, as the log
    has it; none are given for one that the log cuts short. Raises CorruptLog for a step that cannot be."""
    reasons = Reasons(step.view)
    for event in step.follow():
        reasons.before(event)
    return reasons.at_end() if step.is_whole else []
