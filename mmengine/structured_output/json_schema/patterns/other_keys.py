r"""Write the keys that a schema does not name, and their values' schema, for the grammar engine.

The other keys are written as a pattern, because `additionalProperties` treats `"\u0061"` and `"a"` as
different keys. If a key is in `properties` and matches a pattern in patternProperties, the engine does two
things. First, it excludes the key's spelling from the pattern. That is exact, since a pattern spells every
character in a single way, except control characters. It is also fast: a pattern that spells out all names
makes masks thirty times slower. Second, the engine joins both schemas for the key, as JSON Schema demands.
The pattern here stands for other keys only, so its own schema is `true`. The values' schema is in an `allOf`
branch without patterns, which allows any value for the named keys.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from mmengine.structured_output.json_schema.patterns.character_sets import ANY, escape_character, write_class

Json = dict[str, object]
_RESPELLED = re.compile(r"[\x00-\x1f\x7f]")  # Characters that a pattern can spell in several ways.
MARK = "other keys"  # First element of an object's $comment, which describes its last pattern.


@dataclass(frozen=True, slots=True)
class OtherKeys:
    """The keys that are not in `names` and do not start with any prefix in `prefixes`.

    `limit` is a key's maximum number of characters after the first one that differs from every name; 0 means
    no limit.
    """

    names: tuple[str, ...]
    prefixes: tuple[str, ...]
    limit: int

    def pattern(self, spelled_out: bool = False) -> str:
        """Return a pattern for these keys. `spelled_out` excludes the names too, for readers that do not
        exclude them.
        """
        left_out = [name for name in self.names if spelled_out or _RESPELLED.search(name)]
        limit = self.limit
        if limit and not spelled_out:  # A name that is longer than all other keys makes the engine slow.
            limit = max([limit, *(len(name.encode()) + 1 for name in self.names)])
        tail = f"{ANY}{{0,{limit}}}" if limit else f"{ANY}*"
        return f"^(?:{pattern_excluding(left_out, self.prefixes, tail)})$"

    def apply_to(self, schema: Json, patterns: Mapping[str, Json | bool], value: Json | bool) -> Json:
        """Return the object `schema` with `value` as the schema for its other keys."""
        out: Json = {**schema, "patternProperties": {**patterns, self.pattern(): True}}
        out["$comment"] = [MARK, self.limit, *self.prefixes]
        if value is not True:
            any_named = {"properties": dict.fromkeys(self.names, True)} if self.names else {}
            any_named["patternProperties"] = dict.fromkeys(patterns, True)
            out["allOf"] = [{"type": "object", **any_named, "additionalProperties": value}]
        return out


def expand_other_keys(schema: dict, spelled_out: bool = True) -> dict:
    """Rewrite an object schema from `OtherKeys.apply_to` so that patterns alone describe its other keys.
    Unless `spelled_out`, the patterns also match the named keys. Any other schema is returned unchanged.
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
    """Return a pattern for texts that are not in `names` and do not start with any prefix in `prefixes`.
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
    """Return alternatives for the text that may follow this node, or "" if nothing may. The node keys "name"
    and "prefix" mark where a name or a prefix ends.
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
