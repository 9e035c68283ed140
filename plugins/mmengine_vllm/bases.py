"""Defines bases: points at which a log of a running vLLM engine can begin. A base's events restore the
running requests' state.
"""

from msgspec.structs import replace

from mmengine.events import vocabulary as ev
from mmengine.request import MediaItem

Numbered = list[tuple[ev.Event, int]]  # events, each with its step
Written = list[tuple[ev.Event, int, int]]  # events, each with its step and its time in ns


class EncodedItems:
    """Adapts events to a log that began when the encoder cache already had entries.

    `encoded`: the cache's keys when the log began. `beginning`: the log's first events, which may lack some
    keys.
    """

    def __init__(self, encoded: set[bytes], beginning: Numbered):
        self._known, self._hidden = set[bytes](), set[bytes]()
        self._media: dict[str, tuple[MediaItem, ...]] = {}
        for event, _ in beginning:
            self.adapted(event)
        self._hidden = encoded - self._known

    def adapted(self, event: ev.Event) -> ev.Event | None:
        """Return the event for the log, or None to omit the event.

        An entry that the log lacks is recorded as encoded by the first admission that uses the item.
        """
        match event:
            case ev.Queued(request_id=name, media=media) if media:
                self._media[name] = media
            case ev.Finished(request_id=name):
                self._media.pop(name, None)
            case ev.Scheduled(encode=encode):
                self._known.update(key for key, _, _ in encode)
            case ev.Admitted(request_id=name, row=row, encode=encode):
                self._known.update(key for key, _, _ in encode)
                return self._with_hidden(event, row, self._media.get(name, ()))
            case ev.Evicted(keys=keys):
                self._hidden.difference_update(keys)
                keys = tuple(key for key in keys if key in self._known)
                self._known.difference_update(keys)
                return replace(event, keys=keys) if keys else None
        return event

    def _with_hidden(self, event: ev.Admitted, row: int, media: tuple[MediaItem, ...]) -> ev.Admitted:
        found = {item.mm_hash: index for index, item in enumerate(media) if item.mm_hash in self._hidden}
        self._hidden.difference_update(found)
        self._known.update(found)
        return replace(event, encode=event.encode + tuple((key, row, at) for key, at in found.items()))


class Base:
    """A point at which a log can begin. `step`: the recorder's next step. `own_step`: this step's number in
    the log.
    """

    def __init__(self, ns: int, events: Numbered, step: int, own_step: int, encoded: set[bytes]):
        self.ns, self.events, self.shift = ns, events, own_step - step
        self.encoded = encoded
        self.later: Written = []
        self.num_bytes = sum(map(size_of, (event for event, _ in events)))

    def items(self) -> EncodedItems:
        return EncodedItems(self.encoded, self.events)


def size_of(event: ev.Event) -> int:
    """Return an event's approximate size in memory, in bytes."""
    if isinstance(event, ev.Executed):
        return 300 + len(event.token_ids)
    if isinstance(event, ev.Queued):
        return 600 + len(event.prompt) + len(event.outputs)
    return 400
