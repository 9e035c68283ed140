"""The base class of observers, which receive each event of an engine, for example to count events."""

from collections.abc import Callable, Iterable

from mmengine.events.vocabulary import Event


class Observer:
    """Receives each event that an engine records. A subclass overrides `before`, `after` or both."""

    def before(self, event: Event) -> None:
        """Process `event` before the state changes. The event is already in the log's buffer."""

    def after(self, event: Event) -> None:
        """Process `event` after the state has changed."""


class Observers:
    """An engine's observers. `before` and `after` list the methods that the observers override, in order."""

    def __init__(self, observers: Iterable[Observer]):
        self.before: list[Callable[[Event], None]] = []
        self.after: list[Callable[[Event], None]] = []
        for observer in observers:
            if type(observer).before is not Observer.before:
                self.before.append(observer.before)
            if type(observer).after is not Observer.after:
                self.after.append(observer.after)
