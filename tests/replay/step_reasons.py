"""Compute the wait reasons for one step, as the tests need them."""

from mmengine.replay import Step
from mmengine.replay.queries.reasons import Reason, Reasons


def reasons_of(step: Step) -> list[Reason]:
    """Return why each request without tokens in this step got none. The step advances to its logged end; a
    step that the log cuts short has no reasons. Raises CorruptLog for an impossible step.
    """
    reasons = Reasons(step.view)
    for event in step.follow():
        reasons.before(event)
    return reasons.at_end() if step.is_whole else []
