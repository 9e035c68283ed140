"""What events of older formats mean in today's words.

A field that an old record lacks takes its default; that covers most. Where the default of today is not
what an old build did, an upcaster, found by (format, type number), changes the fields before the event
is made of them. An upcaster is pure, and stays for ever.
"""

from collections.abc import Callable


def _started_1(fields: list) -> list:
    """Builds of format 1 had one step in flight where the settings do not say."""
    if len(fields) > 3 and isinstance(fields[3], dict):
        fields[3] = {"max_in_flight": 1, **fields[3]}
    return fields


UPCASTERS: dict[tuple[int, int], Callable[[list], list]] = {(1, 1): _started_1}
