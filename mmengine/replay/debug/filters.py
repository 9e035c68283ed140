"""The debugger's filter language, for conditions that a person types in a terminal or on a web page.

    filter     comparison { "and" comparison }
    comparison [object] field operator literal
    object     "block" NUMBER | "row" NUMBER | "entry" DIGITS | "request" ID
    operator   = != < <= > >= ~ (contains)
    literal    a number, true, false, or a text with or without quotes

No part of a filter is evaluated as code.
"""

import operator
import shlex
from collections.abc import Callable
from typing import NamedTuple

from mmengine.errors import InvalidRequest
from mmengine.events.vocabulary import TYPES
from mmengine.replay.debug.facts import FIELDS, OBJECTS, OF_THE_RECORD, Facts, ObjectFacts

MAX_CHARS = 1000
MAX_COMPARISONS = 16
_OPERATORS: dict[str, Callable[..., bool]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "~": lambda value, part: str(part) in str(value),
}
_KINDS = {kind.__name__.lower(): kind.__name__ for kind in TYPES.values()}
OBJECT_NAMES = {"request": "req", "block": "block", "row": "row", "entry": "entry"}


class Comparison(NamedTuple):
    """A comparison in a filter. `object`: the kind and id of the object that has the field; None for a field
    in FIELDS.
    """

    object: tuple[str, str] | None
    field: str
    operator: str
    literal: int | float | bool | str

    def holds(self, facts: Facts) -> bool:
        if self.object is None:
            value = facts.field(self.field)
        else:
            found = find_object(facts, *self.object)
            if found is None:
                return False
            value = getattr(found, self.field)
        if isinstance(value, str) != isinstance(self.literal, str) and self.operator != "~":
            return self.operator == "!="
        return bool(_OPERATORS[self.operator](value, self.literal))


class Filter(NamedTuple):
    """A filter. `reads_record`: whether a comparison reads a field of the next record."""

    text: str
    comparisons: tuple[Comparison, ...]

    @property
    def reads_record(self) -> bool:
        return any(each.object is None and each.field in OF_THE_RECORD for each in self.comparisons)

    def holds(self, facts: Facts) -> bool:
        return all(each.holds(facts) for each in self.comparisons)


def find_object(facts: Facts, kind: str, name: str) -> ObjectFacts | None:
    """Return the request, block, row or entry with this name, or None."""
    match kind:
        case "block":
            return facts.block(int(name))
        case "row":
            return facts.row(int(name))
        case "entry":
            return facts.entry(name)
    return facts.req(name)


def parse_filter(text: str) -> Filter:
    """Parse a filter. Raises InvalidRequest with the expected syntax."""
    if len(text) > MAX_CHARS:
        raise InvalidRequest(f"the filter has {len(text)} characters; the limit is {MAX_CHARS}")
    words = _words(text)
    comparisons: list[Comparison] = []
    while words:
        if comparisons and words.pop(0) != "and":
            raise InvalidRequest(f"{text!r} is not a filter: join comparisons with 'and'")
        comparisons.append(_comparison(words))
        if len(comparisons) > MAX_COMPARISONS:
            raise InvalidRequest(f"a filter has at most {MAX_COMPARISONS} comparisons")
    if not comparisons:
        raise InvalidRequest("the filter is empty; write for example: free_blocks < 4")
    return Filter(text, tuple(comparisons))


def _words(text: str) -> list[str]:
    lexer = shlex.shlex(text, posix=True, punctuation_chars="=<>!~")
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        return list(lexer)
    except ValueError as error:
        raise InvalidRequest(f"{text!r} is not a filter: {error}") from None


def _comparison(words: list[str]) -> Comparison:
    found: tuple[str, str] | None = None
    fields: tuple[str, ...] = tuple(FIELDS)
    if len(words) >= 4 and words[0] in OBJECT_NAMES and words[1] not in _OPERATORS:
        found = checked_object(words.pop(0), words.pop(0))
        fields = OBJECTS[OBJECT_NAMES[found[0]]]
    if len(words) < 3:
        raise InvalidRequest("a comparison is: field operator literal, such as free_blocks < 4")
    field, sign, literal = words.pop(0), words.pop(0), words.pop(0)
    if field not in fields:
        of = "" if found is None else f" of a {found[0]}"
        raise InvalidRequest(f"there is no field {field!r}{of}; the fields are {', '.join(fields)}")
    if sign not in _OPERATORS:
        raise InvalidRequest(f"there is no operator {sign!r}; use {' '.join(_OPERATORS)}")
    value = _literal(literal)
    if found is None and field == "event":
        value = _KINDS.get(literal.lower(), literal)
        if sign != "~" and value not in _KINDS.values():
            raise InvalidRequest(f"there is no event {literal!r}; the events are {', '.join(TYPE_NAMES)}")
    return Comparison(found, field, sign, value)


TYPE_NAMES = tuple(_KINDS.values())


def event_named(word: str) -> str | None:
    """Return the event kind for a word, ignoring case, or None."""
    return _KINDS.get(word.lower())


def checked_object(kind: str, name: str) -> tuple[str, str]:
    """Return (kind, name) after checking the name. Raises InvalidRequest if a block or row is not a number,
    or an entry's key prefix is not hexadecimal.
    """
    if kind in ("block", "row") and not (name.isascii() and name.isdigit() and len(name) < 10):
        raise InvalidRequest(f"{name!r} is not the number of a {kind}")
    if kind == "entry" and not all(digit in "0123456789abcdef" for digit in name.lower()):
        raise InvalidRequest(f"{name!r} is not the beginning of a key; keys have hexadecimal digits")
    return kind, name


def _literal(word: str) -> int | float | bool | str:
    if word in ("true", "false"):
        return word == "true"
    try:
        return int(word)
    except ValueError:
        try:
            return float(word)
        except ValueError:
            return word
