"""Writes Lark rules for objects whose keys come in any order, or in llguidance's order. In llguidance's
order, the named keys come first, in the schema's order.
"""

from typing import Protocol

import msgspec

from mmengine.structured_output.engines.llguidance.lark_text import quoted
from mmengine.structured_output.json_schema.patterns.character_sets import PatternError
from mmengine.structured_output.json_schema.patterns.matching import MatchBudget
from mmengine.structured_output.json_schema.patterns.other_keys import Json
from mmengine.structured_output.json_schema.rewriting.key_order import MARK
from mmengine.structured_output.json_schema.rewriting.key_patterns import UnnamedKeys, unnamed_keys
from mmengine.structured_output.json_schema.vocabulary.refusal import refuse

# A character in a key. Each character has a single spelling, because keys are compared by spelling.
_CHAR = r'(\\["\\bfnrt]|[^"\\\x00-\x1F])'
# Escaped control characters. Used only if no named key has control characters.
_CONTROL = r"\\u00([01][0-9a-f]|7f)"


class Rules(Protocol):
    """Writes Lark rules. `node`, `json`, `rule` and `terminal` return an expression for a schema or a rule's
    body, and add rules for the expression. `line` adds a line to the grammar. `name` returns a new rule name.

    `budget` limits the steps to match keys against a schema's patterns. `comma` and `colon` are terminals
    that include the white space after them.
    """

    budget: MatchBudget
    comma: str
    colon: str

    def node(self, schema: object) -> str: ...
    def json(self, schema: object) -> str: ...
    def rule(self, body: str) -> str: ...
    def terminal(self, body: str) -> str: ...
    def line(self, line: str) -> None: ...
    def name(self) -> str: ...


def object_rule(schema: Json, rules: Rules) -> str:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    rest = schema.get("additionalProperties", True)
    assert isinstance(properties, dict) and isinstance(required, list)
    names = list(dict.fromkeys((*properties, *required)))
    items: dict[str, str] = {}
    for name in names:
        value = properties.get(name, rest)
        if value is not False:
            items[name] = f"{_spelled(name)} {rules.colon} {rules.node(value)}"
    try:
        found = unnamed_keys(schema, rules.budget)
    except PatternError as error:
        refuse("patternProperties", "", f"beside arrays with contains or uniqueItems: {error}")
    others = [f"{_key(each, names, rules)} {rules.colon} {rules.node(each.value)}" for each in found]
    if MARK in schema:
        return rules.rule(f'"{{" {_in_any_order(items, required, others, rules)} "}}"')
    in_order = [(rules.rule(item), name in required) for name, item in items.items()]
    unnamed = _unnamed(schema, others, len(required), rules)
    body = _sequence(in_order + ([unnamed] if unnamed else []), rules)
    return rules.rule(f'"{{" {body} "}}"')


def _in_any_order(items: dict[str, str], required: list[str], others: list[str], rules: Rules) -> str:
    """Return the rule for items in any order, each at most once.

    Bit n in the rule's parameter says whether item n has occurred. The required items have the lowest bits.
    `others`: rules for unnamed keys with values, which may come anywhere. They are written as a repetition,
    because recursion would enlarge the parser's table.
    """
    ordered = [*required, *(name for name in items if name not in required)]
    complete = f"is_ones([0:{len(required)}])" if required else "true"
    name, one = rules.name(), rules.rule(" | ".join(others)) if others else ""
    ways = [f"{items[each]} {name}::set_bit({at}) %if bit_clear({at})" for at, each in enumerate(ordered)]
    rules.line(f"{name}_one::_: " + "\n    | ".join(ways))
    on = f'"" %if {complete}\n    | {rules.comma} {name}_one::_ %if bit_count_lt(_, {len(items)})'
    if one:
        rules.line(f"{name}_on::_: {on}")
        between = rules.rule(f"({rules.comma} {one})*")
        rules.line(f"{name}::_: {between} {name}_on::_")
    else:
        rules.line(f"{name}::_: {on}")
    first = [f"{name}_one::0x0", *([f"{one} {name}::0x0"] if one else []), *([] if required else ['""'])]
    return rules.rule(" | ".join(first))


def _unnamed(schema: Json, others: list[str], fixed: int, rules: Rules) -> tuple[str, bool] | None:
    """Return the rule for a comma-separated list of unnamed keys with values, and whether at least one
    unnamed key is required. `fixed`: the number of required named keys.
    """
    low, high = schema.get("minProperties", 0), schema.get("maxProperties")
    assert isinstance(low, int) and isinstance(high, int | None)
    low, high = max(0, low - fixed), None if high is None else high - fixed
    if not others or high is not None and high <= 0:
        return None
    one = rules.rule(" | ".join(others))
    if high == 1:
        return one, low > 0
    most = "" if high is None else high - 1
    return rules.rule(f"{one} ({rules.comma} {one}){{{max(0, low - 1)},{most}}}"), low > 0


def _sequence(items: list[tuple[str, bool]], rules: Rules) -> str:
    """Return the expression for the items in order. Optional items may be left out."""
    # `behind` matches the remaining items after a written item. `alone` matches the remaining items if no
    # item was written before.
    behind, alone = '""', '""'
    for item, needed in reversed(items):
        on, first = f"{rules.comma} {item} {behind}", f"{item} {behind}"
        behind = rules.rule(on if needed else f"{on} | {behind}")
        alone = rules.rule(first if needed else f"{first} | {alone}")
    return alone


def _spelled(name: str) -> str:
    return quoted(msgspec.json.encode(name).decode())


def _key(keys: UnnamedKeys, names: list[str], rules: Rules) -> str:
    if keys.regex is None:
        return _but(names, keys.times, rules)
    return rules.json({"type": "string", "pattern": f"^(?:{keys.regex})$"})


def _but(names: list[str], times: str, rules: Rules) -> str:
    """Return a terminal for any key that is not in `names`."""
    if not names and times == "*":
        return rules.json({"type": "string"})
    plain = all(char >= " " and char != "\x7f" for name in names for char in name)
    char = f"({_CHAR}|{_CONTROL})" if plain else _CHAR
    spellings = " | ".join(map(_spelled, names))
    return rules.terminal(f'/"{char}{times}"/' + (f" & ~({spellings})" if names else ""))
