r"""Writes a pattern and a value schema for an object's "other keys", which the object's schema does not name.

A pattern is needed because `additionalProperties` would treat `"\u0061"` and `"a"` as different keys.

The pattern may also match named keys. The grammar engine excludes each name in its usual spelling. In keys
that match a pattern, only control characters have further spellings, so the pattern itself excludes names
with control characters. If the pattern excluded all names, masks would be thirty times slower.

JSON Schema also applies the pattern's schema to named keys that match. The pattern's schema is therefore
`true`, and an `allOf` branch contains the schema for the other keys' values.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from mmengine.structured_output.json_schema.patterns.character_sets import ANY, escape_character, write_class

Json = dict[str, object]
_RESPELLED = re.compile(r"[\x00-\x1f\x7f]")  # Characters with several spellings in a pattern.
MARK = "other keys"  # First element of a $comment that describes an object's pattern for other keys.


@dataclass(frozen=True, slots=True)
class OtherKeys:
    """The keys that are not in `names` and do not start with any prefix in `prefixes`.

    `limit`: how many characters may follow the first character that differs from every name; 0: no limit.
    """

    names: tuple[str, ...]
    prefixes: tuple[str, ...]
    limit: int

    def pattern(self, spelled_out: bool = False) -> str:
        """Return a pattern for these keys.

        With `spelled_out`, the pattern itself excludes the names, for readers other than the grammar engine.
        """
        left_out = [name for name in self.names if spelled_out or _RESPELLED.search(name)]
        limit = self.limit
        if limit and not spelled_out:  # The engine is slow if a name is longer than the pattern allows.
            limit = max([limit, *(len(name.encode()) + 1 for name in self.names)])
        tail = f"{ANY}{{0,{limit}}}" if limit else f"{ANY}*"
        return f"^(?:{pattern_excluding(left_out, self.prefixes, tail)})$"

    def apply_to(self, schema: Json, patterns: Mapping[str, Json | bool], value: Json | bool) -> Json:
        """Return the object's schema with `value` as the schema for the values of its other keys."""
        out: Json = {**schema, "patternProperties": {**patterns, self.pattern(): True}}
        out["$comment"] = [MARK, self.limit, *self.prefixes]
        if value is not True:
            any_named = {"properties": dict.fromkeys(self.names, True)} if self.names else {}
            any_named["patternProperties"] = dict.fromkeys(patterns, True)
            out["allOf"] = [{"type": "object", **any_named, "additionalProperties": value}]
        return out


def expand_other_keys(schema: dict, spelled_out: bool = True) -> dict:
    """Undo `OtherKeys.apply_to`, so that patternProperties alone describes the other keys' values.

    With `spelled_out` False, the patterns also match the named keys. A schema that is not from `apply_to` is
    returned unchanged.
    """
    comment = schema.get("$comment")
    if not isinstance(comment, list) or comment[0] != MARK:
        return schema
    others = OtherKeys(tuple(schema.get("properties", ())), tuple(comment[2:]), comment[1])
    *patterns, last = schema["patternProperties"].items()
    value = schema["allOf"][0]["additionalProperties"] if "allOf" in schema else last[1]
    kept = {keyword: part for keyword, part in schema.items() if keyword not in ("$comment", "allOf")}
    return {**kept, "patternProperties": {**dict(patterns), others.pattern(spelled_out): value}}


def pattern_excluding(names: list[str], prefixes: tuple[str, ...] = (), tail: str = f"{ANY}*") -> str:
    """Return a pattern for texts that are not in `names` and begin with no prefix in `prefixes`.

    `tail` is a pattern for any characters.
    """
    tree: dict[str, dict] = {}
    for text, end in (*((name, "name") for name in names), *((prefix, "prefix") for prefix in prefixes)):
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[end] = {}
    return _node(tree, tail) or "[^\\x00-\\U0010FFFF]"


def _node(node: dict[str, dict], tail: str) -> str:
    """Return a pattern for the text that may follow a trie node, or "" if no text may follow.

    The node keys "name" and "prefix" mark where a name or a prefix ends.
    """
    if "prefix" in node:
        return ""
    chars = {char: child for char, child in node.items() if len(char) == 1}
    out = [] if "name" in node else ["(?:)"]
    if not chars and "name" in node:
        return f"{ANY}{tail}"
    if not chars:
        return tail
    out.append(write_class([(ord(char), ord(char)) for char in chars], negated=True) + tail)
    for char, child in sorted(chars.items()):
        inner = _node(child, tail)
        if inner:
            out.append(escape_character(ord(char)) + inner)
    return f"(?:{'|'.join(out)})"
