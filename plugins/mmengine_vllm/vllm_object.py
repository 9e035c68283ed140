"""Reads objects of vLLM by name, so that a version with other fields gives a fact less and no error."""

from typing import Any, TypeAlias

VllmObject: TypeAlias = Any  # its class is vLLM's, which only `scheduler` imports


def read(thing: VllmObject, path: str, default: VllmObject = None) -> VllmObject:
    """Return the attribute at a dotted path, or `default` if any part of the path is missing or None."""
    for name in path.split("."):
        thing = getattr(thing, name, None)
        if thing is None:
            return default
    return thing
