"""Observers of an engine's events."""

from collections.abc import Callable, Iterable

from mmengine.events.vocabulary import Event


class Observer:
    """Sees each event that an engine records. A subclass overrides the methods that it needs."""

    def before(self, event: Event) -> None:
        """Look at the state before the fold applies `event`; the event is in the log's buffer."""

    def after(self, event: Event) -> None:
        """Look at the state after the fold applied `event`."""


class Observers:
    """One engine's observers. `before` and `after` hold the methods that are overridden, in order."""

    def __init__(self, observers: Iterable[Observer]):
        self.before: list[Callable[[Event], None]] = []
        self.after: list[Callable[[Event], None]] = []
        for observer in observers:
            if type(observer).before is not Observer.before:
                self.before.append(observer.before)
            if type(observer).after is not Observer.after:
                self.after.append(observer.after)
