"""A request with images lets those without go first."""

from mmengine.core.decide import schedule

_admit_next = schedule.admit_next


def admit_next(view):
    return _admit_next(view, lambda req_state: not req_state.request.media) or _admit_next(view)


schedule.admit_next = admit_next
