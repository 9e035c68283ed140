"""Writes a normalized schema for llguidance, as JSON Schema or as a Lark grammar.

llguidance's JSON Schema does not support `contains` and `uniqueItems`, objects with keys in any order, and a
maximum number of digits. Subschemas with these features are written in Lark, as rules and terminals. All
other subschemas stay JSON Schema under `%json`. Both formats skip the same white space, so that llguidance
can combine them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
from llguidance import LLMatcher

from mmengine.structured_output.engines.llguidance.lark_numbers import limited_number
from mmengine.structured_output.engines.llguidance.lark_objects import object_rule
from mmengine.structured_output.engines.unlimited_numbers import MAX_HELD, is_unlimited
from mmengine.structured_output.json_schema.normalization import MAX_OUTPUT
from mmengine.structured_output.json_schema.patterns.matching import MatchBudget
from mmengine.structured_output.json_schema.patterns.other_keys import Json, expand_other_keys
from mmengine.structured_output.json_schema.reading.translation import subschemas
from mmengine.structured_output.json_schema.rewriting.key_order import MARK
from mmengine.structured_output.json_schema.vocabulary.refusal import SchemaRefused, refuse

WHITE_SPACE = r"[\x20\x0A\x0D\x09]+"  # White space in llguidance's JSON Schema.
MARKS = ("x-steps", "x-distinct", MARK)
ONCE = '%llguidance {"ignore_once": true}'


class _Schema(msgspec.Struct):
    options: dict[str, str | bool] = msgspec.field(default_factory=dict, name="x-guidance")


# Built at import: msgspec crashes if two threads are the first to use a type.
_decode_schema = msgspec.json.Decoder(_Schema).decode


def schema_grammar(text: str, max_digits: int = 0) -> str:
    """Return a normalized schema in llguidance's format.

    `max_digits`: see `lark_of`.
    """
    lark = lark_of(text, max_digits)
    if lark is None and len(text) > MAX_HELD:
        lark = _in_lark(text)
    return LLMatcher.grammar_from_json_schema(text) if lark is None else LLMatcher.grammar_from_lark(lark)


def _in_lark(text: str) -> str:
    """Return a Lark grammar that contains only the JSON Schema `text`.

    llguidance holds the GIL while it parses plain JSON Schema (18 ms per megabyte), but not while it parses
    Lark.
    """
    head = _head(_decode_schema(text).options)
    return "\n".join([*head, f"start: %json {text}\n"])


def _head(options: Mapping[str, object]) -> list[str]:
    """Return the Lark lines that allow white space between JSON tokens.

    With fixed white space, the grammar has no `%ignore` line.
    """
    if not options.get("whitespace_flexible", True):
        return [ONCE]
    return [ONCE, f"%ignore /{options.get('whitespace_pattern', WHITE_SPACE)}/"]


def lark_of(text: str, max_digits: int = 0) -> str | None:
    """Return a normalized schema's Lark grammar, or None if llguidance supports the schema as JSON Schema.

    `max_digits`: maximum number of digits in each part (integer, fraction, exponent) for numbers that the
    schema does not limit; 0 for no limit. Schemas with more than MAX_HELD characters have no limit, because
    writing them in Lark would hold the GIL for too long.
    """
    is_limited = bool(max_digits) and len(text) <= MAX_HELD
    if not is_limited and not any(f'"{mark}"' in text for mark in MARKS):
        return None
    schema: Json = msgspec.json.decode(text, type=dict)
    options = schema.pop("x-guidance", {})
    definitions = schema.pop("$defs", {})
    assert isinstance(options, dict) and isinstance(definitions, dict)
    if is_limited:
        try:
            return _grammar(schema, options, definitions, max_digits)
        except SchemaRefused:
            pass  # Try again without the digit limit, because the grammar is then shorter.
    return _grammar(schema, options, definitions, 0)


def _grammar(schema: Json, options: Json, definitions: dict[str, Json], max_digits: int) -> str | None:
    writer = _Writer(options, definitions, max_digits)
    return writer.grammar(schema) if writer.needs(schema) else None


@dataclass(slots=True)
class _Writer:
    options: Json
    definitions: dict[str, Json]
    max_digits: int = 0
    needing: set[str] = field(default_factory=set)  # Names of definitions that are written in Lark.
    parts: dict[str, str] = field(default_factory=dict)  # JSON Schema text -> the rule that contains it.
    lines: list[str] = field(default_factory=list)
    size: int = 0
    rules: int = 0
    budget: MatchBudget = field(default_factory=MatchBudget)
    anything: str = ""  # The rule for any JSON value, or "" before the first use.
    comma: str = field(init=False)
    colon: str = field(init=False)

    def __post_init__(self) -> None:
        self.comma = msgspec.json.encode(self.options.get("item_separator", ",")).decode()
        self.colon = msgspec.json.encode(self.options.get("key_separator", ":")).decode()
        grown = True
        while grown:
            more = {
                name
                for name, schema in self.definitions.items()
                if name not in self.needing and self.needs(schema)
            }
            self.needing |= more
            grown = bool(more)

    def needs(self, schema: object) -> bool:
        """Return whether the schema or a subschema must be written in Lark."""
        if self.max_digits and (schema is True or schema == {}):
            return True
        if not isinstance(schema, dict):
            return False
        if any(mark in schema for mark in MARKS) or self.max_digits and is_unlimited(schema):
            return True
        if "$ref" in schema:
            return _name(schema) in self.needing
        return any(self.needs(child) for child in _children(expand_other_keys(schema, spelled_out=False)))

    def grammar(self, schema: Json) -> str:
        for line in _head(self.options):
            self.line(line)
        self.line(f"start: {self.node(schema)}")
        for name in sorted(self.needing):
            self.line(f"d_{name}: {self.node(self.definitions[name])}")
        return "\n".join(self.lines)

    def node(self, schema: object) -> str:
        """Return the Lark expression for a schema."""
        if not self.needs(schema):
            return self.json(schema)
        if not isinstance(schema, dict) or not schema:
            return self._anything()
        if "$ref" in schema:
            return f"d_{_name(schema)}"
        if "anyOf" in schema:
            branches: list[object] = schema["anyOf"]
            parts = [self.node(branch) for branch in branches if self.needs(branch)]
            # Branches in JSON Schema share a rule, because llguidance refuses a rule that only has an empty
            # number range.
            plain = [branch for branch in branches if not self.needs(branch)]
            return self.rule(" | ".join([*parts, *([self.json({"anyOf": plain})] if plain else [])]))
        if "x-steps" in schema:
            steps = schema["x-steps"]
            return self._steps([tuple(edge) for edge in steps["edges"]], set(steps["ends"]))
        if "x-distinct" in schema:
            return self._distinct(schema["x-distinct"])
        if schema["type"] == "array":
            return self._array(schema)
        if schema["type"] != "object":
            return self._number(schema)
        return object_rule(expand_other_keys(schema, spelled_out=False), self)

    def _number(self, schema: Json) -> str:
        body, rest = limited_number(schema, self.max_digits)
        ways = [self.json(rest)] if rest is not None else []
        return self.rule(" | ".join([*ways, *([self.terminal(body)] if body else [])]))

    def _anything(self) -> str:
        """Return the rule for any JSON value with the digit limit."""
        if not self.anything:
            self.anything = value = self.name()
            text = self.json({"type": "string"})
            member = self.rule(f"{text} {self.colon} {value}")
            pairs, items = (self.rule(f"{one} ({self.comma} {one})*") for one in (member, value))
            plain = [self.json({"enum": [False, True, None]}), text, self._number({"type": "number"})]
            self.line(f'{value}: {" | ".join(plain)} | "[" {items}? "]" | "{{" {pairs}? "}}"')
        return self.anything

    def json(self, schema: object) -> str:
        """Return the rule for a subschema that stays JSON Schema, with its referenced definitions."""
        names: dict[str, None] = {}
        waiting = [schema]
        for each in waiting:
            if isinstance(each, dict):
                if "$ref" in each and _name(each) not in names:
                    names[_name(each)] = None
                    waiting.append(self.definitions[_name(each)])
                waiting += _children(each)
        body = {} if schema is True else schema
        assert isinstance(body, dict)
        whole: Json = {"x-guidance": self.options, **body}
        if names:
            whole["$defs"] = {name: self.definitions[name] for name in names}
        text = msgspec.json.encode(whole).decode()
        if text not in self.parts:
            self.parts[text] = self.rule(f"%json {text}")
        return self.parts[text]

    def name(self) -> str:
        """Return a new rule name. No other rule's name begins with this name and an underscore."""
        self.rules += 1
        return f"r_{self.rules}"

    def rule(self, body: str) -> str:
        name = self.name()
        self.line(f"{name}: {body}")
        return name

    def terminal(self, body: str) -> str:
        self.rules += 1
        name = f"T_{self.rules}"
        self.line(f"{name}: {body}")
        return name

    def line(self, line: str) -> None:
        self.size += len(line)
        if self.size > MAX_OUTPUT:
            refuse("", "", f"the schema's grammar has more than {MAX_OUTPUT:,} characters")
        self.lines.append(line)

    def _array(self, schema: Json) -> str:
        prefix, low = schema.get("prefixItems", []), schema.get("minItems", 0)
        high = schema.get("maxItems")
        assert isinstance(prefix, list) and isinstance(low, int) and isinstance(high, int | None)
        rest = schema.get("items", True)
        told = max(len(prefix), low) if high is None else high
        places = [*prefix, *([rest] * (told - len(prefix)))][:told]
        if rest is False:
            places = places[: len(prefix)]
        edges: list[tuple[int, int, object]] = [(at, at + 1, item) for at, item in enumerate(places)]
        if high is None and rest is not False:
            edges.append((told, told, rest))
        return self._steps(edges, set(range(low, len(places) + 1)))

    def _steps(self, edges: list[tuple[int, int, object]], ends: set[int]) -> str:
        """Return the expression for an array whose items follow an automaton.

        An edge is (state, next state, item's schema). State 0 is the start state.
        """
        self.rules += 1
        name = f"a_{self.rules}"
        ways: dict[tuple[int, int], list[str]] = {}
        for start, to, item in edges:
            ways.setdefault((start, to), []).append(self.node(item))
        joined = {way: self.rule(" | ".join(dict.fromkeys(items))) for way, items in ways.items()}
        states = sorted({state for way in joined for state in way} | ends | {0})
        for state in states:
            again = joined.get((state, state))
            on = [
                f"{self.comma} {item} {name}_{to}"
                for (start, to), item in joined.items()
                if start == state != to
            ]
            on += ['""'] if state in ends else []
            loop = self.rule(f"{self.comma} {again}") + "*" if again else ""
            # Loops are repetitions, because recursion would enlarge the parser's table.
            self.line(f"{name}_{state}: {loop} {self.rule(' | '.join(on))}")
        first = [f"{item} {name}_{to}" for (start, to), item in joined.items() if start == 0]
        first += ['""'] if 0 in ends else []
        return self.rule(f'"[" {self.rule(" | ".join(first))} "]"')

    def _distinct(self, given: Json) -> str:
        """Return the expression for an array of distinct values.

        Bit n in the rule's parameter says whether value n has occurred.
        """
        values = given["values"]
        assert isinstance(values, list)
        low, high, matching, least, most = (
            int(str(given[key])) for key in ("minItems", "maxItems", "matching", "minContains", "maxContains")
        )
        count = len(values)
        # Maximum number of items that do not match `contains`. With more, the required matches would not fit.
        others = min(count - matching, high - least)
        enough = [f"bit_count_ge(_, {low})"] + ([f"bit_count_ge([0:{matching}], {least})"] if least else [])
        self.rules += 1
        name = f"u_{self.rules}"
        lines = []
        for at, value in enumerate(values):
            conditions = [f"bit_clear({at})", f"bit_count_lt(_, {high})"]
            if at < matching and most < matching:
                conditions.append(f"bit_count_lt([0:{matching}], {most})")
            if at >= matching and others < count - matching:
                conditions.append(f"bit_count_lt([{matching}:{count}], {others})")
            lines.append(f"{self.node(value)} {name}_on::set_bit({at}) %if {_all(conditions)}")
        self.line(f"{name}::_: " + "\n    | ".join(lines))
        most_of_all = min(high, min(most, matching) + others)
        # A comma is allowed only if a value can follow.
        more = f"{self.comma} {name}::_ %if bit_count_lt(_, {most_of_all})"
        self.line(f'{name}_on::_: "" %if {_all(enough)}\n    | {more}')
        empty = ' | ""' if not low and not least else ""
        return self.rule(f'"[" {self.rule(f"{name}::0x0{empty}")} "]"')


def _all(conditions: list[str]) -> str:
    out = conditions[-1]
    for condition in reversed(conditions[:-1]):
        out = f"and({condition}, {out})"
    return out


def _name(schema: Json) -> str:
    return str(schema["$ref"]).removeprefix("#/$defs/")


def _children(schema: Json) -> list[object]:
    """Return the direct subschemas of a normalized schema."""
    return [child for _, child in subschemas(schema)]
