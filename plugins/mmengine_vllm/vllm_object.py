"""Reads attributes of vLLM's objects by name. If a vLLM version lacks an attribute, a default is returned."""

from typing import Any, TypeAlias

VllmObject: TypeAlias = Any  # any vLLM object; has no type, because this module does not import vLLM


def read(thing: VllmObject, path: str, default: VllmObject = None) -> VllmObject:
    """Return the attribute at a dotted path, or `default` if an attribute is missing or None."""
    for name in path.split("."):
        thing = getattr(thing, name, None)
        if thing is None:
            return default
    return thing
