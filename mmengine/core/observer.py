"""The base class of observers: objects that see each event of an engine, for example to count events."""

from collections.abc import Callable, Iterable

from mmengine.events.vocabulary import Event


class Observer:
    """Sees each event that an engine records. A subclass overrides `before`, `after` or both."""

    def before(self, event: Event) -> None:
        """Process `event` before it is applied to the state. The log's buffer already contains the event."""

    def after(self, event: Event) -> None:
        """Process `event` after it was applied to the state."""


class Observers:
    """One engine's observers. `before` and `after` list the overridden methods, in the observers' order."""

    def __init__(self, observers: Iterable[Observer]):
        self.before: list[Callable[[Event], None]] = []
        self.after: list[Callable[[Event], None]] = []
        for observer in observers:
            if type(observer).before is not Observer.before:
                self.before.append(observer.before)
            if type(observer).after is not Observer.after:
                self.after.append(observer.after)
