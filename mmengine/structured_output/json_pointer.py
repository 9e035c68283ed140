"""Writes and reads JSON pointers, and follows references within a schema."""

from urllib.parse import unquote


def join_pointer(pointer: str, *names: str | int) -> str:
    """Return `pointer` extended by `names`, which are escaped by RFC 6901."""
    for name in names:
        text = str(name)
        if "~" in text or "/" in text:
            text = text.replace("~", "~0").replace("/", "~1")
        pointer = f"{pointer}/{text}"
    return pointer


def pointer_names(fragment: str) -> list[str]:
    """Return the names in a JSON pointer that is a URI's fragment."""
    return [unquote(name).replace("~1", "/").replace("~0", "~") for name in fragment[1:].split("/")]


def local_target(root: object, reference: str) -> object:
    """Return the schema to which a reference within `root` leads, or None for any other reference."""
    if reference == "#":
        return root
    if not reference.startswith("#/"):
        return None
    found = root
    for name in pointer_names(reference[1:]):
        if isinstance(found, dict):
            found = found.get(name)
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found
