"""The keys that a schema does not name, and what they hold: how the grammar engine is given them.

As a pattern, for `additionalProperties` takes `"\\u0061"` for another key than `"a"`. Of a key that matches
a pattern of patternProperties, and is in `properties`, the engine does two things. It takes it out of the
pattern by its spelling, which is exact, as a pattern has one spelling of all but control characters; and
fast, where a pattern that is a tree of all names makes masks thirty times slower. And it joins both schemas
of the key, as JSON Schema wants, but not we, who mean other keys. So the pattern's own schema is `true`, and
what the keys hold stands in a part of `allOf` without patterns, in which the named keys hold anything.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from mmengine.structured_output.json_schema.patterns.character_sets import ANY, char_class, escaped

Json = dict[str, object]
_RESPELLED = re.compile(r"[\x00-\x1f\x7f]")  # characters that a pattern spells in more than one way
MARK = "other keys"  # begins the $comment of an object, which says what its last pattern means


@dataclass(frozen=True, slots=True)
class OtherKeys:
    """Those that are none of `names` and start with none of `prefixes`. `limit`: most characters (behind what
    is shared with one that is told apart by the pattern); 0: no limit."""

    names: tuple[str, ...]
    prefixes: tuple[str, ...]
    limit: int

    def pattern(self, spelled_out: bool = False) -> str:
        """`spelled_out`: without the names, where nobody else takes them out."""
        left_out = [name for name in self.names if spelled_out or _RESPELLED.search(name)]
        limit = self.limit
        if limit and not spelled_out:  # a name that is longer than all others makes the engine slow
            limit = max([limit, *(len(name.encode()) + 1 for name in self.names)])
        tail = f"{ANY}{{0,{limit}}}" if limit else f"{ANY}*"
        return f"^(?:{all_but(left_out, self.prefixes, tail)})$"

    def written(self, schema: Json, patterns: Mapping[str, Json | bool], value: Json | bool) -> Json:
        """The object `schema`, whose other keys hold `value`."""
        out: Json = {**schema, "patternProperties": {**patterns, self.pattern(): True}}
        out["$comment"] = [MARK, self.limit, *self.prefixes]
        if value is not True:
            any_named = {"properties": dict.fromkeys(self.names, True)} if self.names else {}
            any_named["patternProperties"] = dict.fromkeys(patterns, True)
            out["allOf"] = [{"type": "object", **any_named, "additionalProperties": value}]
        return out


def by_patterns(schema: dict, spelled_out: bool = True) -> dict:
    """An object as `OtherKeys.written` gives it, in which the patterns alone say which keys hold what; unless
    `spelled_out`, but for the named ones."""
    comment = schema.get("$comment")
    if not isinstance(comment, list) or comment[0] != MARK:
        return schema
    others = OtherKeys(tuple(schema.get("properties", ())), tuple(comment[2:]), comment[1])
    *patterns, last = schema["patternProperties"].items()
    value = schema["allOf"][0]["additionalProperties"] if "allOf" in schema else last[1]
    kept = {keyword: part for keyword, part in schema.items() if keyword not in ("$comment", "allOf")}
    return {**kept, "patternProperties": {**dict(patterns), others.pattern(spelled_out): value}}


def all_but(names: list[str], prefixes: tuple[str, ...] = (), tail: str = f"{ANY}*") -> str:
    """What is none of `names`, and starts with none of `prefixes`. `tail`: any characters."""
    tree: dict[str, dict] = {}
    for text, end in (*((name, "name") for name in names), *((prefix, "prefix") for prefix in prefixes)):
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[end] = {}
    return _node(tree, tail) or "[^\\x00-\\U0010FFFF]"


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
