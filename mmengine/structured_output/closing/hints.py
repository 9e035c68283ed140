"""Collects hints from a grammar's source: keys, values and string patterns that the grammar's texts may
contain.

Hints make the search for completions (search.py) fast. The matcher decides which hints fit at a position.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil

import msgspec

from mmengine.request import GrammarRequest
from mmengine.structured_output.closing.call_position import CallSyntax
from mmengine.structured_output.closing.json_position import Position
from mmengine.structured_output.closing.shortest_text import TextPattern
from mmengine.structured_output.json_schema.rewriting.key_order import MARK
from mmengine.structured_output.json_schema.vocabulary.keywords import is_number
from mmengine.structured_output.request.tool_calls import calls_of

MAX_TEXTS = 200  # Maximum number of string patterns from a grammar.
MAX_LEAVES = 4_000  # Maximum number of values from a grammar.
_SIMPLE = (*(str(digit) for digit in range(10)), "-1", '""', "[]", "{}", "null", "true", "false")


class ObjectKeys:
    """An object's properties in schema order. `places` maps a key, spelled as JSON, to its index."""

    def __init__(self, names: Iterable[str], required: Iterable[str]):
        self.places = {json_spelling(name): place for place, name in enumerate(names)}
        self.required = frozenset(map(json_spelling, required))


@dataclass
class Hints:
    """Hints for a grammar.

    `leaves` has values as JSON text, shortest first. `texts` has patterns for strings or, if `is_bare`, for
    the whole answer. `literals` has strings in their JSON spelling, without quotation marks. `keys` has each
    object's properties. `due` has the JSON spelling of each required key in objects whose keys may come in
    any order. `owners` maps a spelled key to the objects with this key. `calls` is the tool call syntax if
    the text may contain calls.
    """

    leaves: list[bytes]
    literals: list[bytes]
    texts: list[TextPattern]
    keys: list[ObjectKeys]
    due: list[bytes] = field(default_factory=list)
    is_bare: bool = False
    calls: CallSyntax | None = None

    def __post_init__(self) -> None:
        self.owners: dict[bytes, list[ObjectKeys]] = {}
        for each in self.keys:
            for name in each.places:
                self.owners.setdefault(name, []).append(each)

    def advance(self, place: Position, text: bytes) -> Position:
        """Return the position after `text`, which begins at `place`."""
        if self.is_bare:
            return place.advance_bare(text)
        return place.advance(text) if self.calls is None else self.calls.advance(place, text)

    def is_free(self, place: Position) -> bool:
        """Return whether `place` lies in free text outside tool calls. Free text may end anywhere."""
        return self.calls is not None and self.calls.is_free(place)

    def rests(self, string: bytes) -> list[bytes]:
        """Return possible endings for a string or bare answer that begins with `string`, shortest first.

        The endings do not include the closing quotation mark.
        """
        found = [each[len(string) :] for each in self.literals if each.startswith(string)]
        beginning = _from_spelling(string, self.is_bare)
        if beginning is not None:
            for text in self.texts:
                rest = text.rest(beginning)
                if rest is not None:
                    found.append(rest.encode(errors="replace") if self.is_bare else json_spelling(rest))
        return sorted(dict.fromkeys(found), key=len)

    def key_rests(self, string: bytes) -> list[bytes]:
        """Return the possible endings for a key that begins with `string`, shortest first."""
        found = [name[len(string) :] for name in self.owners if name.startswith(string)]
        return sorted(found, key=len)

    def due_rests(self, string: bytes) -> list[bytes]:
        """Return possible endings for a required key in an object whose keys may come in any order."""
        return sorted((name[len(string) :] for name in self.due if name.startswith(string)), key=len)

    def best_keys(self, rests: Sequence[bytes], string: bytes) -> list[bytes]:
        """Return the endings of the keys to try next, best first. `rests`: endings that the grammar allows
        after `string`, shortest first.

        If an object has all these keys, and the last key in its schema order is required, only this key's
        ending is returned. The grammar allows this key next, so the earlier keys are optional, and the object
        is shortest without them.
        """
        for owner in self.owners.get(string + rests[0], ()):
            places = [owner.places.get(string + rest, -1) for rest in rests]
            if min(places) >= 0:
                last = rests[places.index(max(places))]
                return [last] if string + last in owner.required else [*rests[:3], last]
        return list(rests[:4])


def hints_of(grammar: GrammarRequest) -> Hints:
    if grammar.kind == "regex":
        return Hints([], [], [TextPattern((f"(?:{grammar.source})",))], [], is_bare=True)
    found = {} if grammar.kind == "lark" else msgspec.json.decode(grammar.source)
    if grammar.kind == "choice":
        return Hints([], sorted((each.encode() for each in found), key=len), [], [], is_bare=True)
    literals: dict[bytes, None] = {}
    texts: dict[TextPattern, None] = {}
    leaves: dict[bytes, None] = {each.encode(): None for each in _SIMPLE}
    keys = []
    due: dict[bytes, None] = {}
    for node in _objects(found):
        names = node.get("properties")
        if isinstance(names, dict):
            required = node.get("required", ())
            required = required if isinstance(required, list) else []
            keys.append(ObjectKeys(names, required))
            if MARK in node:
                due |= dict.fromkeys(map(json_spelling, required))
        for pattern in _patterns(node):
            texts.setdefault(pattern)
        for value in _values(node):
            leaves.setdefault(value)
            if value.startswith(b'"'):
                literals.setdefault(value[1:-1])
    some = list(texts)[:MAX_TEXTS]
    for text in some:
        rest = text.rest("")
        if rest is not None:
            leaves.setdefault(b'"' + json_spelling(rest) + b'"')
    literals.setdefault(b"")
    asked = calls_of(grammar)
    for tool in () if asked is None else asked.tools:
        literals.setdefault(tool.name.encode())
    calls = None if asked is None else CallSyntax.of(asked)
    shortest = sorted(leaves, key=len)[:MAX_LEAVES]
    return Hints(shortest, sorted(literals, key=len), some, keys, list(due), calls=calls)


def json_spelling(text: str) -> bytes:
    """Return a text's spelling inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1].encode(errors="replace")


def _from_spelling(string: bytes, is_bare: bool) -> str | None:
    """Return the text of a JSON string's beginning, or None if `string` ends within a character."""
    try:
        text = string.decode()
        if is_bare or "\\" not in text:
            return text
        read = json.loads(f'"{text}"')
        return read if isinstance(read, str) else None
    except ValueError:
        return None


def _objects(found: object) -> Iterator[dict[str, object]]:
    waiting = [found]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            yield each
            waiting += reversed(list(each.values()))
        elif isinstance(each, list):
            waiting += reversed(each)


def _patterns(node: Mapping[str, object]) -> Iterator[TextPattern]:
    """Yield the pattern for a schema's strings (with allOf and minLength), and each pattern for keys."""
    inner = node.get("allOf")
    parts = [node, *(part for part in inner if isinstance(part, dict))] if isinstance(inner, list) else [node]
    patterns = tuple(_bare(part["pattern"]) for part in parts if isinstance(part.get("pattern"), str))
    low = node.get("minLength")
    if patterns or isinstance(low, int):
        yield TextPattern(patterns, low if isinstance(low, int) else 0)
    of_keys = node.get("patternProperties")
    for pattern in of_keys if isinstance(of_keys, dict) else ():
        yield TextPattern((_bare(pattern),))


def _bare(pattern: object) -> str:
    """Return a pattern without its anchors."""
    return str(pattern).removeprefix("^").removesuffix("$")


def _values(node: Mapping[str, object]) -> Iterator[bytes]:
    values = node.get("enum")
    for value in (*(values if isinstance(values, list) else ()), node.get("const")):
        if isinstance(value, str | int | float | list | dict):
            yield json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")
    multiple = node.get("multipleOf")
    for name, side in (("minimum", 1), ("exclusiveMinimum", 1), ("maximum", -1), ("exclusiveMaximum", -1)):
        value = node.get(name)
        if is_number(value):  # The node may be a `properties` object in which a property has this name.
            yield from _near(value, side, multiple if is_number(multiple) else 1)


def _near(value: int | float, side: int, multiple: int | float) -> Iterator[bytes]:
    """Yield numbers near a limit: the limit itself, the next round numbers, and the next multiples."""
    bound, one = Fraction(str(value)), Fraction(str(multiple)) or Fraction(1)
    yield json.dumps(value).encode()
    for step in dict.fromkeys((one, Fraction(1), Fraction(1, 10), Fraction(1, 100))):
        first = ceil(side * bound / step)
        for number in (first, first + 1):
            found = side * number * step
            yield json.dumps(int(found) if found.denominator == 1 else float(found)).encode()
