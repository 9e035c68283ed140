"""The keys of an object made plain.

propertyNames is worked into the properties and patterns; and patterns that a key may match together are told
apart, so that each key is allowed by one of them alone.
"""

import re
from collections.abc import Callable
from itertools import combinations
from typing import NamedTuple

from msgspec.structs import replace

from mmengine.structured_output.json_schema.constraints.json_types import (
    Blocked,
    Conj,
    Object,
    Shape,
    String,
    both,
)
from mmengine.structured_output.json_schema.patterns.character_sets import ANY, PatternError, escaped
from mmengine.structured_output.json_schema.patterns.languages import (
    combined,
    kinds,
    languages,
    overlap,
    written,
)
from mmengine.structured_output.json_schema.patterns.matching import Budget
from mmengine.structured_output.json_schema.patterns.other_keys import Json
from mmengine.structured_output.json_schema.patterns.pattern import Pattern
from mmengine.structured_output.json_schema.vocabulary.keywords import shown
from mmengine.structured_output.json_schema.vocabulary.refusal import step

MAX_NAMES = 1_000  # that propertyNames lists
MAX_KINDS = 16  # of keys, by which patterns they match

_ANY_KEY = re.compile(r"\^\(\?:\(\?s:\.\)(\*|\{0,\d+\})\)\$")
Named = dict[str, tuple[Pattern, Conj]]


class Unnamed(NamedTuple):
    """Keys that an object does not name: those that match `regex`, or any others with `times` as many
    characters (of a regular expression). `value`: the schema of what they hold."""

    regex: str | None
    times: str
    value: object


def unnamed_keys(schema: Json, budget: Budget) -> list[Unnamed]:
    """Of an object by its patterns (keys.py). PatternError where they cannot be told from those it names."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    patterns, rest = schema.get("patternProperties", {}), schema.get("additionalProperties", True)
    assert isinstance(properties, dict) and isinstance(required, list) and isinstance(patterns, dict)
    names = list(dict.fromkeys((*properties, *required)))
    out = []
    for pattern, value in patterns.items():
        anything = _ANY_KEY.fullmatch(pattern)
        left = None if anything or value is False else without_names(_inner(pattern), names, budget)
        if value is not False and (anything or left is not None):
            out.append(Unnamed(left, anything[1] if anything else "", value))
    if rest is not False and not patterns:
        out.append(Unnamed(None, "*", rest))
    elif rest is not False:
        left = but_none([*map(exact, names), *map(_inner, patterns)], budget)
        out += [] if left is None else [Unnamed(left, "", rest)]
    return out


def _inner(pattern: str) -> str:
    return pattern.removeprefix("^(?:").removesuffix(")$")


def plain_keys(
    piece: Object, shapes_of: Callable[[Conj], list[Shape]], nothing: Conj, pointer: str, budget: Budget
) -> Object:
    """`nothing`: the schema false. What cannot be worked in is blocked, with the keyword's name."""
    try:
        if piece.names:
            found = [shape["string"] for shape in shapes_of(piece.names) if "string" in shape]
            piece = _named(piece, [one for one in found if isinstance(one, String)], nothing, budget)
    except PatternError as error:
        blocked: Blocked = (("propertyNames", step(pointer, "propertyNames"), str(error)),)
        return replace(piece, names=(), blocked=piece.blocked + blocked)
    try:
        groups = _together(piece, budget)
    except PatternError:
        return piece  # the grammar engine says it where a key may match two of them
    out: Named = {}
    for group in groups:
        try:
            out |= group if len(group) == 1 else _parted(group, budget)
        except PatternError as error:
            why = f"a key may match {shown(next(iter(group)))} and another one, and {error}"
            blocked = (("patternProperties", step(pointer, "patternProperties"), why),)
            return replace(piece, blocked=piece.blocked + blocked)
    return replace(piece, patterns=out)


def _named(piece: Object, allowed: list[String], nothing: Conj, budget: Budget) -> Object:
    if any(one == String() for one in allowed):
        return replace(piece, names=())
    blocked = tuple(each for one in allowed for each in one.blocked)
    properties = {
        name: conj if any(_holds(one, name) for one in allowed) else nothing
        for name, conj in piece.properties.items()
    }
    for name in piece.required:
        if name not in properties and not any(_holds(one, name) for one in allowed):
            properties[name] = nothing
    listed = [value for one in allowed for value in one.values or () if _holds(one, value)]
    if len(listed) > MAX_NAMES:
        raise PatternError(f"it lists more than {MAX_NAMES:,} names")
    open_ones = [one for one in allowed if one.values is None]
    others = [name for name in dict.fromkeys(listed) if name not in properties]
    if others and (piece.patterns or piece.low > 1):
        properties |= {name: piece.property(name) for name in others}
    elif others:  # as a pattern they may come in any order
        open_ones.append(String(patterns=(Pattern("|".join(map(exact, others)), None, budget=budget),)))
    patterns: Named = {}
    if open_ones:
        patterns = _within(piece, open_ones, nothing, budget)
    return replace(
        piece,
        properties=properties,
        patterns=patterns,
        rest=nothing,
        names=(),
        blocked=piece.blocked + blocked,
    )


def _holds(string: String, name: str) -> bool:
    if string.values is not None and name not in string.values:
        return False
    if len(name) < string.low or string.high is not None and len(name) > string.high:
        return False
    return all(pattern.matches(name) for pattern in string.patterns)


def _within(piece: Object, allowed: list[String], nothing: Conj, budget: Budget) -> Named:
    """The patterns of an object, and one for all other keys, each only for keys that are allowed."""
    one = allowed[0]
    # A pattern speaks of properties too that it matches, and that for other keys must not.
    names = [name for name in dict.fromkeys((*piece.properties, *piece.required)) if piece.rest]
    named = [name for name in names if any(_holds(one, name) for one in allowed)]
    is_one = len(allowed) == 1 and len(one.patterns) + bool(one.low or one.high) == 1
    if is_one and not piece.patterns and not named:
        pattern = one.patterns[0] if one.patterns else Pattern(_length(one), None, budget=budget)
        return {"propertyNames": (pattern, piece.rest)}
    groups = [
        [pattern.regex for pattern in one.patterns] + ([_length(one)] if one.low or one.high else [])
        for one in allowed
    ]
    asked = [regex for group in groups for regex in group]
    taken = [exact(name) for name in named]
    patterns = [pattern.regex for pattern, _ in piece.patterns.values()]
    parts = languages([*asked, *patterns, *taken], budget)

    def is_allowed(has: list[bool]) -> bool:
        at = 0
        for group in groups:
            if all(has[at : at + len(group)]):
                return True
            at += len(group)
        return False

    out: Named = {}
    for at, (text, (_, conj)) in enumerate(piece.patterns.items(), len(asked)):
        both_hold = combined([*parts[: len(asked)], parts[at]], lambda has: has[-1] and is_allowed(has))
        if not both_hold.is_empty():
            out[text] = (Pattern(written(both_hold), None, budget=budget), conj)
    if piece.rest != nothing:
        other = combined(parts, lambda has: is_allowed(has) and not any(has[len(asked) :]))
        if not other.is_empty():
            out["propertyNames"] = (Pattern(written(other), None, budget=budget), piece.rest)
    return out


def exact(name: str) -> str:
    """The pattern of one name."""
    return "".join(escaped(ord(char)) for char in name)


def without_names(regex: str, names: list[str], budget: Budget) -> str | None:
    """The pattern but for names; None when it matches nothing else. PatternError where that is too much."""
    taken = [name for name in names if budget.matches(regex, name)]
    if not taken:
        return regex
    parts = languages([regex, *map(exact, taken)], budget)
    left = combined(parts, lambda has: has[0] and not any(has[1:]))
    return None if left.is_empty() else written(left)


def but_none(regexes: list[str], budget: Budget) -> str | None:
    """What matches none of the patterns; None when there is nothing. PatternError where that is too much."""
    left = combined(languages(regexes, budget), lambda has: not any(has))
    return None if left.is_empty() else written(left)


def _length(string: String) -> str:
    return f"{ANY}{{{string.low},{'' if string.high is None else string.high}}}"


def _together(piece: Object, budget: Budget) -> list[Named]:
    """The patterns, those together that are bound to one another by keys that match both."""
    texts = list(piece.patterns)
    together = {text: {text} for text in texts}  # sets that are shared by their members
    for a, b in combinations(texts, 2):
        if together[a] is together[b] or _apart_by_prefix(piece.patterns[a][0], piece.patterns[b][0]):
            continue
        if overlap(piece.patterns[a][0].regex, piece.patterns[b][0].regex, budget):
            joined = together[a] | together[b]
            together |= dict.fromkeys(joined, joined)
    groups = [[each for each in texts if each in together[text]] for text in texts]
    return [
        {each: piece.patterns[each] for each in group}
        for text, group in zip(texts, groups)
        if group[0] == text
    ]


def _apart_by_prefix(a: Pattern, b: Pattern) -> bool:
    if a.prefix is None or b.prefix is None:
        return False
    return not a.prefix.startswith(b.prefix) and not b.prefix.startswith(a.prefix)


def _parted(group: Named, budget: Budget) -> Named:
    parts = languages([pattern.regex for pattern, _ in group.values()], budget)
    found = kinds(parts)
    if len(found) > MAX_KINDS:
        raise PatternError(f"together they make more than {MAX_KINDS} kinds of keys")
    out: Named = {}
    for kind in found:
        conj: Conj = ()
        for holds, (_, one) in zip(kind, group.values()):
            conj = both(conj, one) if holds else conj
        name = " and ".join(text for holds, text in zip(kind, group) if holds)
        regex = written(combined(parts, list(kind).__eq__))
        out[name] = (Pattern(regex, None, budget=budget), conj)
    return out
