"""Writes and reads JSON pointers, and follows references within a schema."""

import re
from functools import reduce
from urllib.parse import unquote

_INDEX = re.compile("0|[1-9][0-9]{0,8}")  # An array index by RFC 6901, below 10^9.


def join_pointer(pointer: str, *names: str | int) -> str:
    """Return `pointer` extended by `names`, which are escaped by RFC 6901."""
    parts = [pointer]  # One join, because a reference may have a million names.
    for name in names:
        text = str(name)
        if "~" in text or "/" in text:
            text = text.replace("~", "~0").replace("/", "~1")
        parts += ("/", text)
    return "".join(parts)


def pointer_names(fragment: str) -> list[str]:
    """Return the names in a JSON pointer that is a URI's fragment."""
    return [unquote(name).replace("~1", "/").replace("~0", "~") for name in fragment[1:].split("/")]


def child_of(value: object, name: str) -> object:
    """Return the property or array element `name` of a JSON value, or None."""
    if isinstance(value, dict):
        return value.get(name)
    if isinstance(value, list) and _INDEX.fullmatch(name) and int(name) < len(value):
        return value[int(name)]
    return None


def local_target(root: object, reference: str) -> object:
    """Return the schema in `root` at a reference (# or #/…), or None for any other reference."""
    if reference == "#":
        return root
    return reduce(child_of, pointer_names(reference[1:]), root) if reference.startswith("#/") else None
