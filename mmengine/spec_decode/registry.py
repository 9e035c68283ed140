"""Drafters that need nothing but texts, by name; a stranger's come by entry points.

An entry point in the group `mmengine.drafters` names a callable that takes the number of rows and gives a
Drafter.
"""

from collections.abc import Callable
from importlib.metadata import entry_points

from mmengine.errors import ConfigError
from mmengine.spec_decode.base import Drafter
from mmengine.spec_decode.ngram import NgramDrafter
from mmengine.spec_decode.suffix import SuffixDrafter

GROUP = "mmengine.drafters"
_OWN: dict[str, Callable[[int], Drafter]] = {"ngram": NgramDrafter, "suffix": SuffixDrafter}


def free_drafter(name: str) -> Callable[[int], Drafter]:
    """What makes the drafter `name` for a number of rows. Raises ConfigError where there is none, or where it
    cannot be loaded."""
    if name in _OWN:
        return _OWN[name]
    found = {point.name: point for point in entry_points(group=GROUP)}
    if name not in found:
        known = ", ".join(["none", "auto", "grammar", *_OWN, "eagle3", *sorted(found)])
        raise ConfigError(f"spec {name!r} is no drafter; known are {known}")
    try:
        return found[name].load()
    except Exception as error:  # a stranger's module
        raise ConfigError(
            f"spec {name!r} cannot be loaded from its entry point: {type(error).__name__}: {error}"
        ) from None
