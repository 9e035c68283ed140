"""The base class of all events."""

import msgspec


class EventBase(msgspec.Struct, array_like=True, frozen=True):
    """The base class of all events; the union `Event` is in vocabulary.py."""
