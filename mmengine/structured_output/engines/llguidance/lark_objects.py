"""Objects in Lark, as llguidance writes those of JSON Schema: named properties in order, then all others."""

import json
import re
from typing import Protocol

from mmengine.structured_output.json_schema.characters import PatternError
from mmengine.structured_output.json_schema.key_patterns import but_none, exact, without_names
from mmengine.structured_output.json_schema.matching import Budget
from mmengine.structured_output.json_schema.refusal import refuse

Json = dict[str, object]
# Characters of a key in one spelling each, as names are told from it by how they are spelled.
_CHAR = r'(\\["\\bfnrt]|[^"\\\x00-\x1F])'
_CONTROL = r"\\u00([01][0-9a-f]|7f)"  # where no name holds one
_ANY = re.compile(r"\^\(\?:\(\?s:\.\)(\*|\{0,\d+\})\)\$")


class Rules(Protocol):
    """Where rules are added; each gives what stands for it in another rule. `budget`: of a schema, for
    comparing keys with patterns."""

    budget: Budget

    def node(self, schema: object) -> str: ...
    def json(self, schema: object) -> str: ...
    def rule(self, body: str) -> str: ...
    def terminal(self, body: str) -> str: ...


def object_rule(schema: Json, rules: Rules) -> str:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    patterns, rest = schema.get("patternProperties", {}), schema.get("additionalProperties", True)
    assert isinstance(properties, dict) and isinstance(required, list) and isinstance(patterns, dict)
    names = list(dict.fromkeys((*properties, *required)))
    items: list[tuple[str, bool]] = []
    for name in names:
        value = properties.get(name, rest)
        if value is not False:
            items.append((rules.rule(f'{_spelled(name)} ":" {rules.node(value)}'), name in required))
    keys = [(_key(pattern, names, rules), value) for pattern, value in patterns.items() if value is not False]
    if rest is not False:
        keys.append((_other_key(names, list(patterns), rules), rest))
    others = [f'{key} ":" {rules.node(value)}' for key, value in keys if key is not None]
    unnamed = _unnamed(schema, others, len(required), rules)
    body = _sequence(items + ([unnamed] if unnamed else []), rules)
    return rules.rule(f'"{{" {body} "}}"')


def _unnamed(schema: Json, others: list[str], fixed: int, rules: Rules) -> tuple[str, bool] | None:
    """Keys without a name, with commas between them, and whether there must be one."""
    low, high = schema.get("minProperties", 0), schema.get("maxProperties")
    assert isinstance(low, int) and isinstance(high, int | None)
    low, high = max(0, low - fixed), None if high is None else high - fixed
    if not others or high is not None and high <= 0:
        return None
    one = rules.rule(" | ".join(others))
    most = "" if high is None else high - 1
    return rules.rule(f'{one} ("," {one}){{{max(0, low - 1)},{most}}}'), low > 0


def _sequence(items: list[tuple[str, bool]], rules: Rules) -> str:
    """All in their order; those that are not required may be left out."""
    behind, alone = '""', '""'  # what may follow a property, and what may stand where none came yet
    for item, needed in reversed(items):
        on, first = f'"," {item} {behind}', f"{item} {behind}"
        behind = rules.rule(on if needed else f"{on} | {behind}")
        alone = rules.rule(first if needed else f"{first} | {alone}")
    return alone


def _spelled(name: str) -> str:
    return _text(json.dumps(name, ensure_ascii=False))


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _key(pattern: str, names: list[str], rules: Rules) -> str | None:
    """Keys that match, without the names; None where there is none."""
    anything = _ANY.fullmatch(pattern)
    if anything:
        return _but(names, anything[1], rules)
    try:
        left = without_names(_inner(pattern), names, rules.budget)
        return None if left is None else rules.json({"type": "string", "pattern": _whole(left)})
    except PatternError as error:
        refuse("patternProperties", "", f"beside arrays whose items count together: {error}")


def _other_key(names: list[str], patterns: list[str], rules: Rules) -> str | None:
    """Keys that are none of the names and match none of the patterns."""
    if not patterns:
        return _but(names, "*", rules)
    try:
        left = but_none([*map(exact, names), *map(_inner, patterns)], rules.budget)
        return None if left is None else rules.json({"type": "string", "pattern": _whole(left)})
    except PatternError as error:
        refuse("patternProperties", "", f"beside arrays whose items count together: {error}")


def _but(names: list[str], times: str, rules: Rules) -> str:
    """Any key but the names."""
    if not names and times == "*":
        return rules.json({"type": "string"})
    plain = all(char >= " " and char != "\x7f" for name in names for char in name)
    char = f"({_CHAR}|{_CONTROL})" if plain else _CHAR
    spellings = " | ".join(map(_spelled, names))
    return rules.terminal(f'/"{char}{times}"/' + (f" & ~({spellings})" if names else ""))


def _inner(pattern: str) -> str:
    return pattern.removeprefix("^(?:").removesuffix(")$")


def _whole(regex: str) -> str:
    return f"^(?:{regex})$"
