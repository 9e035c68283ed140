"""Who was preempted stands at the end of the queue, behind those who came later."""

from mmengine.core.state.state import State

_enqueue = State.enqueue


def enqueue(self, request):
    _enqueue(self, request)
    if request.preempted:
        self.waiting.remove(request)
        self.waiting.append(request)


State.enqueue = enqueue
