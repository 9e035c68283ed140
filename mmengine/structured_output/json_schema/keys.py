"""Patterns for the keys that a schema does not name: anything but certain names and prefixes.

The engine excludes named keys by how they are spelled, and `"\\u0061"` is another spelling of `"a"`. So the
keys that are left are written as a pattern of their own, from a tree of the names' characters.
"""

from mmengine.structured_output.json_schema.characters import ANY, char_class, escaped


def other_keys(names: list[str], prefixes: list[str], limit: int) -> str:
    """A whole-string pattern for every key that is none of `names` and starts with none of `prefixes`.

    `limit`: most characters (behind the part shared with a name); 0: no limit.
    """
    tree: dict[str, dict] = {}
    for text, end in (*((name, "name") for name in names), *((prefix, "prefix") for prefix in prefixes)):
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[end] = {}
    return _node(tree, f"{ANY}{{0,{limit}}}" if limit else f"{ANY}*") or "[^\\x00-\\U0010FFFF]"


def _node(node: dict[str, dict], tail: str) -> str:
    """Alternatives for what may follow here; "" when nothing may. Names of two letters or more are ends."""
    if "prefix" in node:
        return ""
    chars = {char: child for char, child in node.items() if len(char) == 1}
    out = [] if "name" in node else ["(?:)"]
    if not chars and "name" in node:
        return f"{ANY}{tail}"
    if not chars:
        return tail
    out.append(char_class([(ord(char), ord(char)) for char in chars], negated=True) + tail)
    for char, child in sorted(chars.items()):
        inner = _node(child, tail)
        if inner:
            out.append(escaped(ord(char)) + inner)
    return f"(?:{'|'.join(out)})"
