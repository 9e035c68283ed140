"""A planted bug: a preempted request goes to the end of the queue, after later arrivals."""

from mmengine.core.state.state import State

_enqueue = State.enqueue


def enqueue(self, request):
    _enqueue(self, request)
    if request.preempted:
        self.waiting.remove(request)
        self.waiting.append(request)


State.enqueue = enqueue
