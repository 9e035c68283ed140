"""Observers for an engine's events."""

from collections.abc import Callable, Iterable

from mmengine.events.vocabulary import Event


class Observer:
    """Sees each event that an engine records. A subclass overrides the methods that it needs."""

    def before(self, event: Event) -> None:
        """Process `event` before it is applied to the state. The event is already in the log's buffer."""

    def after(self, event: Event) -> None:
        """Process `event` after it was applied to the state."""


class Observers:
    """One engine's observers. `before` and `after`: the bound methods of the observers that override `before`
    or `after`, in order.
    """

    def __init__(self, observers: Iterable[Observer]):
        self.before: list[Callable[[Event], None]] = []
        self.after: list[Callable[[Event], None]] = []
        for observer in observers:
            if type(observer).before is not Observer.before:
                self.before.append(observer.before)
            if type(observer).after is not Observer.after:
                self.after.append(observer.after)
