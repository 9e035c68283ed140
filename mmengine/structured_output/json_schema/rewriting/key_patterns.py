"""Rewrites an object's key patterns, so that each key matches a single pattern.

propertyNames is merged into the properties and patterns. Overlapping patterns are split.

The terms part, place, conjunction, constraint and shape are explained in constraints/json_types.py.
"""

import re
from collections.abc import Callable
from itertools import combinations
from typing import NamedTuple

from msgspec.structs import replace

from mmengine.structured_output.json_pointer import join_pointer
from mmengine.structured_output.json_schema.constraints.json_types import (
    Blocked,
    Conjunction,
    Object,
    Shape,
    String,
    conjoin,
)
from mmengine.structured_output.json_schema.patterns.character_sets import ANY, PatternError, escape_character
from mmengine.structured_output.json_schema.patterns.languages import (
    build_languages,
    combine,
    has_overlap,
    membership_patterns,
    write_pattern,
)
from mmengine.structured_output.json_schema.patterns.matching import BudgetExceeded, MatchBudget
from mmengine.structured_output.json_schema.patterns.other_keys import Json
from mmengine.structured_output.json_schema.patterns.pattern import Pattern
from mmengine.structured_output.json_schema.vocabulary.keywords import show_value

MAX_NAMES = 1_000  # Maximum number of names that propertyNames may list.
MAX_KINDS = 16  # Maximum number of pattern combinations into which overlapping patterns are split.

_ANY_KEY = re.compile(r"\^\(\?:\(\?s:\.\)(\*|\{0,\d+\})\)\$")
KeyPatterns = dict[str, tuple[Pattern, Conjunction]]


class UnnamedKeys(NamedTuple):
    """Keys that an object's schema does not name. `value`: the schema for the keys' values.

    The keys match `regex`. If `regex` is None, the keys are arbitrary texts, whose length must fit the
    quantifier `times`, such as "*" or "{0,9}".
    """

    regex: str | None
    times: str
    value: object


def unnamed_keys(schema: Json, budget: MatchBudget) -> list[UnnamedKeys]:
    """Return an object schema's unnamed keys. `schema` must come from `expand_other_keys` (other_keys.py).
    Raises PatternError if the unnamed keys cannot be distinguished from the named keys.
    """
    properties, required = schema.get("properties", {}), schema.get("required", [])
    patterns, rest = schema.get("patternProperties", {}), schema.get("additionalProperties", True)
    assert isinstance(properties, dict) and isinstance(required, list) and isinstance(patterns, dict)
    names = list(dict.fromkeys((*properties, *required)))
    out = []
    for pattern, value in patterns.items():
        anything = _ANY_KEY.fullmatch(pattern)
        left = None if anything or value is False else exclude_names(_inner(pattern), names, budget)
        if value is not False and (anything or left is not None):
            out.append(UnnamedKeys(left, anything[1] if anything else "", value))
    if rest is not False and not patterns:
        out.append(UnnamedKeys(None, "*", rest))
    elif rest is not False:
        left = exclude_patterns([*map(literal_pattern, names), *map(_inner, patterns)], budget)
        out += [] if left is None else [UnnamedKeys(left, "", rest)]
    return out


def _inner(pattern: str) -> str:
    return pattern.removeprefix("^(?:").removesuffix(")$")


def separate_keys(
    constraint: Object,
    shapes_of: Callable[[Conjunction], list[Shape]],
    nothing: Conjunction,
    pointer: str,
    budget: MatchBudget,
) -> Object:
    """Return the object after merging propertyNames and splitting overlapping patterns.

    `nothing`: the conjunction for the schema `false`. If a keyword cannot be merged or split, the returned
    object lists the keyword and the reason in `blocked`.
    """
    try:
        if constraint.names:
            found = [shape["string"] for shape in shapes_of(constraint.names) if "string" in shape]
            constraint = _apply_property_names(
                constraint, [one for one in found if isinstance(one, String)], nothing, budget
            )
    except PatternError as error:
        blocked: Blocked = (("propertyNames", join_pointer(pointer, "propertyNames"), str(error)),)
        return replace(constraint, names=(), blocked=constraint.blocked + blocked)
    try:
        groups = _group_overlapping(constraint, budget)
    except BudgetExceeded as error:
        blocked = (("patternProperties", join_pointer(pointer, "patternProperties"), str(error)),)
        return replace(constraint, blocked=constraint.blocked + blocked)
    except PatternError:
        return constraint  # The grammar engine will report an error if a key may match two patterns.
    out: KeyPatterns = {}
    for group in groups:
        try:
            out |= group if len(group) == 1 else _split_group(group, budget)
        except PatternError as error:
            why = f"a key may match {show_value(next(iter(group)))} and another pattern, and {error}"
            blocked = (("patternProperties", join_pointer(pointer, "patternProperties"), why),)
            return replace(constraint, blocked=constraint.blocked + blocked)
    return replace(constraint, patterns=out)


def _apply_property_names(
    constraint: Object, allowed: list[String], nothing: Conjunction, budget: MatchBudget
) -> Object:
    if any(one == String() for one in allowed):
        return replace(constraint, names=())
    blocked = tuple(each for one in allowed for each in one.blocked)
    properties = {
        name: conj if any(_holds(one, name) for one in allowed) else nothing
        for name, conj in constraint.properties.items()
    }
    for name in constraint.required:
        if name not in properties and not any(_holds(one, name) for one in allowed):
            properties[name] = nothing
    listed = [value for one in allowed for value in one.values or () if _holds(one, value)]
    if len(listed) > MAX_NAMES:
        raise PatternError(f"propertyNames lists more than {MAX_NAMES:,} names")
    open_ones = [one for one in allowed if one.values is None]
    others = [name for name in dict.fromkeys(listed) if name not in properties]
    if others and (constraint.patterns or constraint.low > 1):
        properties |= {name: constraint.property(name) for name in others}
    elif others:  # A pattern, unlike properties, allows the names in any order.
        open_ones.append(
            String(patterns=(Pattern("|".join(map(literal_pattern, others)), None, budget=budget),))
        )
    patterns: KeyPatterns = {}
    if open_ones:
        patterns = _restrict_patterns(constraint, open_ones, nothing, budget)
    return replace(
        constraint,
        properties=properties,
        patterns=patterns,
        rest=nothing,
        names=(),
        blocked=constraint.blocked + blocked,
    )


def _holds(string: String, name: str) -> bool:
    if string.values is not None and name not in string.values:
        return False
    if len(name) < string.low or string.high is not None and len(name) > string.high:
        return False
    return all(pattern.matches(name) for pattern in string.patterns)


def _restrict_patterns(
    constraint: Object, allowed: list[String], nothing: Conjunction, budget: MatchBudget
) -> KeyPatterns:
    """Return the object's patterns and a pattern for all other keys, each restricted to the allowed keys."""
    one = allowed[0]
    # Object patterns may also match named properties, but the pattern for other keys must not.
    names = [
        name for name in dict.fromkeys((*constraint.properties, *constraint.required)) if constraint.rest
    ]
    named = [name for name in names if any(_holds(one, name) for one in allowed)]
    is_one = len(allowed) == 1 and len(one.patterns) + bool(one.low or one.high) == 1
    if is_one and not constraint.patterns and not named:
        pattern = one.patterns[0] if one.patterns else Pattern(_length(one), None, budget=budget)
        return {"propertyNames": (pattern, constraint.rest)}
    groups = [
        [pattern.regex for pattern in one.patterns] + ([_length(one)] if one.low or one.high else [])
        for one in allowed
    ]
    asked = [regex for group in groups for regex in group]
    taken = [literal_pattern(name) for name in named]
    patterns = [pattern.regex for pattern, _ in constraint.patterns.values()]
    parts = build_languages([*asked, *patterns, *taken], budget)

    def is_allowed(has: list[bool]) -> bool:
        at = 0
        for group in groups:
            if all(has[at : at + len(group)]):
                return True
            at += len(group)
        return False

    out: KeyPatterns = {}
    for at, (text, (_, conj)) in enumerate(constraint.patterns.items(), len(asked)):
        both_hold = combine(
            [*parts[: len(asked)], parts[at]], lambda has: has[-1] and is_allowed(has), budget
        )
        if not both_hold.is_empty():
            out[text] = (Pattern(write_pattern(both_hold), None, budget=budget), conj)
    if constraint.rest != nothing:
        other = combine(parts, lambda has: is_allowed(has) and not any(has[len(asked) :]), budget)
        if not other.is_empty():
            out["propertyNames"] = (Pattern(write_pattern(other), None, budget=budget), constraint.rest)
    return out


def literal_pattern(name: str) -> str:
    """Return a pattern that matches only this name."""
    return "".join(escape_character(ord(char)) for char in name)


def exclude_names(regex: str, names: list[str], budget: MatchBudget) -> str | None:
    """Return a pattern for texts that match `regex` but are not in `names`, or None if there are no such
    texts.

    Raises PatternError if the budget is exceeded.
    """
    taken = [name for name in names if budget.matches(regex, name)]
    if not taken:
        return regex
    parts = build_languages([regex, *map(literal_pattern, taken)], budget)
    left = combine(parts, lambda has: has[0] and not any(has[1:]), budget)
    return None if left.is_empty() else write_pattern(left)


def exclude_patterns(regexes: list[str], budget: MatchBudget) -> str | None:
    """Return a pattern for texts that match none of `regexes`, or None if there are no such texts.

    Raises PatternError if the budget is exceeded.
    """
    left = combine(build_languages(regexes, budget), lambda has: not any(has), budget)
    return None if left.is_empty() else write_pattern(left)


def _length(string: String) -> str:
    return f"{ANY}{{{string.low},{'' if string.high is None else string.high}}}"


def _group_overlapping(constraint: Object, budget: MatchBudget) -> list[KeyPatterns]:
    """Group the patterns, so that patterns in different groups do not overlap."""
    texts = list(constraint.patterns)
    together = {text: {text} for text in texts}  # Pattern -> its group. All members share the group's set.
    for a, b in combinations(texts, 2):
        if together[a] is together[b] or _apart_by_prefix(
            constraint.patterns[a][0], constraint.patterns[b][0]
        ):
            continue
        if has_overlap(constraint.patterns[a][0].regex, constraint.patterns[b][0].regex, budget):
            joined = together[a] | together[b]
            together |= dict.fromkeys(joined, joined)
    groups = [[each for each in texts if each in together[text]] for text in texts]
    return [
        {each: constraint.patterns[each] for each in group}
        for text, group in zip(texts, groups)
        if group[0] == text
    ]


def _apart_by_prefix(a: Pattern, b: Pattern) -> bool:
    if a.prefix is None or b.prefix is None:
        return False
    return not a.prefix.startswith(b.prefix) and not b.prefix.startswith(a.prefix)


def _split_group(group: KeyPatterns, budget: MatchBudget) -> KeyPatterns:
    parts = build_languages([pattern.regex for pattern, _ in group.values()], budget)
    found = membership_patterns(parts, budget)
    if len(found) > MAX_KINDS:
        raise PatternError(f"together the patterns make more than {MAX_KINDS} kinds of keys")
    out: KeyPatterns = {}
    for kind in found:
        conj: Conjunction = ()
        for holds, (_, one) in zip(kind, group.values()):
            conj = conjoin(conj, one) if holds else conj
        name = " and ".join(text for holds, text in zip(kind, group) if holds)
        regex = write_pattern(combine(parts, list(kind).__eq__, budget))
        out[name] = (Pattern(regex, None, budget=budget), conj)
    return out
