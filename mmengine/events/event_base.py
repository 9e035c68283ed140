"""Defines the base class for all events in a log."""

import msgspec


class EventBase(msgspec.Struct, array_like=True, frozen=True):
    """The base class for all events. The union `Event` in vocabulary.py lists its subclasses."""
