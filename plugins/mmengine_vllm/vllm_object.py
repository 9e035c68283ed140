"""Reads attributes of vLLM's objects by name.

If a version of vLLM lacks an attribute, the reader gets a default instead of an error.
"""

from typing import Any, TypeAlias

VllmObject: TypeAlias = Any  # any object of vLLM; only `scheduler` imports vLLM


def read(thing: VllmObject, path: str, default: VllmObject = None) -> VllmObject:
    """Return the attribute at a dotted path, or `default` if any part of the path is missing or None."""
    for name in path.split("."):
        thing = getattr(thing, name, None)
        if thing is None:
            return default
    return thing
