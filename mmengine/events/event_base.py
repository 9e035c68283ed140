"""What all events are."""

import msgspec


class EventBase(msgspec.Struct, array_like=True, frozen=True):
    """What all events are; `Event` of vocabulary.py is one of them."""
