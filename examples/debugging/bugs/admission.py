"""A planted bug: requests without images are admitted before requests with images."""

from mmengine.core.decide.admission import Admission

_admit_next = Admission.admit_next


def admit_next(self, view):
    return _admit_next(self, view, lambda req_state: not req_state.request.media) or _admit_next(self, view)


Admission.admit_next = admit_next
