"""Writes a normalized schema (json_schema/normalization.py) as EBNF for xgrammar. Refuses a schema with a
keyword that is not on this module's allow-list.

xgrammar's own JSON Schema reader silently drops many keywords and misreads others. Therefore xgrammar never
gets a schema.
"""

import json
import re
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NoReturn

from mmengine.structured_output.json_pointer import join_pointer
from mmengine.structured_output.json_schema.patterns.character_sets import PatternError
from mmengine.structured_output.json_schema.patterns.matching import MatchBudget
from mmengine.structured_output.json_schema.patterns.other_keys import expand_other_keys
from mmengine.structured_output.json_schema.rewriting.key_order import MARK
from mmengine.structured_output.json_schema.vocabulary.keywords import to_fraction
from mmengine.structured_output.json_schema.vocabulary.refusal import refuse
from mmengine.structured_output.regex.tree import Chars, Node, Repeat
from mmengine_xgrammar.numbers import NumberRefused, Range, write_number, write_range
from mmengine_xgrammar.regex import ANY, RegexRefused, parse_whole_regex, with_width, write_regex
from mmengine_xgrammar.rules import EMPTY, MAX_COUNTED, Rules, either, literal

ADVICE = "use llguidance, the default"
ADVICE_FOR_LENGTHS = f'set "bounds": {{"string": 0}} or a smaller maxLength, or {ADVICE}'
QUOTE = literal('"')
_RANGE = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_KEYWORDS = {
    "null": (),
    "boolean": (),
    "integer": (*_RANGE, "multipleOf"),
    "number": (*_RANGE, "multipleOf"),
    "string": ("minLength", "maxLength", "pattern", "enum"),
    "array": ("prefixItems", "items", "minItems", "maxItems"),
    "object": (
        *("properties", "required", "additionalProperties", "patternProperties"),
        # MARK allows any key order, so the EBNF may fix an order.
        *("minProperties", "maxProperties", "$comment", MARK),
    ),
}


def schema_ebnf(text: str, most_digits: int = 0) -> str:
    """Write a normalized schema as EBNF. Raises SchemaRefused if the schema cannot be enforced exactly.

    `most_digits`: maximum number of digits in a number without a minimum or without a maximum; 0: no limit.
    """
    schema = json.loads(text)
    options = schema.pop("x-guidance", {})
    # The EBNF omits the additional spellings that this option allows.
    options.pop("json_allow_general_unicode_escapes", None)
    definitions = schema.pop("$defs", {})
    writer = _Writer(*_spacing(options), most_digits)
    names = {name: writer.rules.reserve() for name in definitions}
    writer.names = {f"#/$defs/{name}": rule for name, rule in names.items()}
    root = writer.value(schema, "")
    for name, definition in definitions.items():
        writer.rules.give(names[name], writer.value(definition, f"/$defs/{name}"))
    for option in options:
        _refuse_at(option, "/x-guidance", "this option")
    return writer.rules.text(root)


def _refuse_at(keyword: str, pointer: str, part: str, advice: str = ADVICE) -> NoReturn:
    refuse(keyword, pointer, f"grammar_backend xgrammar cannot enforce {part}; {advice}")


def _spacing(options: dict[str, Any]) -> tuple[str, str, str]:
    """Return expressions for white space inside brackets, for a comma with its white space, and for a colon
    with its white space.

    Removes the white-space options from `options`.
    """
    pattern = options.pop("whitespace_pattern", None)
    if options.pop("whitespace_flexible", True) is False:
        comma, colon = (options.pop(f"{name}_separator") for name in ("item", "key"))
        return EMPTY, literal(comma), literal(colon)
    bound = re.fullmatch(r"\[\\x20\\x0A\\x0D\\x09\]\{1,(\d+)\}", pattern) if pattern else None
    if pattern and not bound:
        _refuse_at("whitespace_pattern", "/x-guidance", repr(pattern))
    space = f"[ \\n\\r\\t]{{0,{bound[1]}}}" if bound else "[ \\n\\r\\t]*"
    return space, f"{space} {literal(',')} {space}", f"{space} {literal(':')} {space}"


@dataclass(slots=True)
class _Writer:
    space: str
    comma: str
    colon: str
    most_digits: int = 0
    rules: Rules = field(default_factory=Rules)
    names: dict[str, str] = field(default_factory=dict)  # Reference -> rule name of the definition.
    budget: MatchBudget = field(default_factory=MatchBudget)  # Limits the matching of names with patterns.

    def value(self, schema: Any, pointer: str) -> str:
        """Return an expression for a schema's values."""
        if schema is True or schema == {}:
            return self._anything()
        if "$ref" in schema:
            self._only(schema, ("$ref",), pointer)
            return self.names[schema["$ref"]]
        if "anyOf" in schema:
            self._only(schema, ("anyOf",), pointer)
            ways = [
                self.value(way, join_pointer(pointer, "anyOf", at)) for at, way in enumerate(schema["anyOf"])
            ]
            return self.rules.add(" | ".join(ways))
        if "type" not in schema:
            self._only(schema, ("enum", "const"), pointer)
            return self._constants(schema.get("enum", [schema.get("const")]))
        kind = schema["type"]
        if kind == "object":
            schema = expand_other_keys(schema)
        self._only(schema, ("type", *_KEYWORDS[kind]), pointer)
        return {
            "null": lambda: literal("null"),
            "boolean": lambda: self._constants([False, True]),
            "integer": lambda: self._number(schema, pointer),
            "number": lambda: self._number(schema, pointer),
            "string": lambda: self._string(schema, pointer),
            "array": lambda: self._array(schema, pointer),
            "object": lambda: self._object(schema, pointer),
        }[kind]()

    def _only(self, schema: dict, known: tuple[str, ...], pointer: str) -> None:
        for keyword in schema:
            if keyword not in known:
                self._refuse(keyword, pointer, "this keyword")

    def _constants(self, values: list) -> str:
        return self.rules.words([json.dumps(value, ensure_ascii=False) for value in values])

    def _anything(self) -> str:
        """Return an expression for any JSON value."""
        if "" not in self.names:
            name = self.names[""] = self.rules.reserve()
            parts = [{"type": "array"}, {"type": "object", "patternProperties": {"^(?:(?s:.)*)$": True}}]
            ways = [self.value(part, "") for part in (*parts, {"type": "string"}, {"type": "number"})]
            self.rules.give(name, " | ".join([*ways, self._constants([True, False, None])]))
        return self.names[""]

    def _number(self, schema: dict, pointer: str) -> str:
        if len(schema) == 1:
            return self.rules.add(write_number(schema["type"] == "integer", self.most_digits))
        ends: dict[str, tuple[Fraction | None, bool]] = {}
        for keyword in _RANGE:
            if keyword in schema:
                end = "low" if keyword.endswith("inimum") else "high"
                if end in ends:
                    self._refuse(keyword, pointer, "an inclusive and an exclusive bound together")
                ends[end] = (to_fraction(schema[keyword]), keyword.startswith("exclusive"))
        multiple = to_fraction(schema.get("multipleOf", 0))
        if schema["type"] == "integer":
            multiple = Fraction(multiple.numerator or 1)
        low, high = (ends.get(end, (None, False)) for end in ("low", "high"))
        try:
            found = write_range(Range(*low, *high, multiple, self.most_digits), self.rules)
        except NumberRefused as error:
            self._refuse("multipleOf", pointer, str(error))
        if found is None:
            refuse("multipleOf", join_pointer(pointer, "multipleOf"), "the range contains no such number")
        return found

    def _string(self, schema: dict, pointer: str) -> str:
        low, high = schema.get("minLength", 0), schema.get("maxLength")
        if "enum" in schema:  # Normalization has already applied the lengths.
            self._only(schema, ("type", "enum"), pointer)
            return self._constants(schema["enum"])
        if "pattern" not in schema:
            node: Node = Repeat(Chars(ANY), low, high)
            if max(low, high or 0) > MAX_COUNTED:
                keyword = "maxLength" if high else "minLength"
                self._refuse(keyword, pointer, f"lengths above {MAX_COUNTED}", ADVICE_FOR_LENGTHS)
            return self.rules.add(f"{QUOTE} {write_regex(node, self.rules, in_json=True, end=QUOTE)}")
        return self._quoted(schema["pattern"], "pattern", pointer, low, high)

    def _quoted(self, pattern: str, keyword: str, pointer: str, low: int = 0, high: int | None = None) -> str:
        """Return an expression for all JSON spellings of strings that match a pattern."""
        try:
            node = with_width(parse_whole_regex(pattern), low, high)
            if node is None:
                lengths = f"at least {low}" if high is None else f"{low} to {high}"
                part = f"the pattern with a length of {lengths} characters"
                self._refuse(keyword, pointer, part, ADVICE_FOR_LENGTHS)
            return self.rules.add(f"{QUOTE} {write_regex(node, self.rules, in_json=True, end=QUOTE)}")
        except RegexRefused as error:
            self._refuse(keyword, pointer, f"the pattern ({error})")

    def _array(self, schema: dict, pointer: str) -> str:
        low, high = schema.get("minItems", 0), schema.get("maxItems")
        prefix = schema.get("prefixItems", [])
        if schema.get("items") is False and (high is None or high > len(prefix)):
            high = len(prefix)
        items = [
            self.value(part, join_pointer(pointer, "prefixItems", at))
            for at, part in enumerate(prefix[:high])
        ]
        rest = None
        if high is None or high > len(items):
            rest = self.value(schema.get("items", True), join_pointer(pointer, "items"))
        return self._listed("[", items, rest, low, high, "]")

    def _listed(
        self, opens: str, items: list[str], rest: str | None, low: int, high: int | None, ends: str
    ) -> str:
        """Return an expression for `low` to `high` items: `items` in order, then `rest` repeatedly."""
        tail = EMPTY
        if rest is not None:
            most = None if high is None else high - max(1, len(items))
            tail = _times(f"{self.comma} {rest}", max(0, low - max(1, len(items))), most)
        for at in range(len(items) - 1, 0, -1):
            more = f"{self.comma} {items[at]} {tail}"
            tail = self.rules.add(more if at < low else f"{more} | {EMPTY}")
        first = items[0] if items else rest
        if first is None or high == 0:
            inside = self.space
        else:
            inside = f"{self.space} {first} {tail} {self.space}"
            if low == 0:
                inside = either([inside, self.space])
        return self.rules.add(f"{literal(opens)} {inside} {literal(ends)}")

    def _object(self, schema: dict, pointer: str) -> str:
        named = {name: part for name, part in schema.get("properties", {}).items() if part is not False}
        required = schema.get("required", [])
        low, high = schema.get("minProperties", 0), schema.get("maxProperties")
        if schema.get("additionalProperties", False) is not False:
            self._refuse("additionalProperties", pointer, "this keyword beside patternProperties")
        if (low or high is not None) and len(required) != len(named):
            keyword = "minProperties" if low else "maxProperties"
            self._refuse(keyword, pointer, "this keyword beside optional properties")
        pairs = []
        for name, part in named.items():
            value = self.value(part, join_pointer(pointer, "properties", name))
            pairs.append((self._pair(literal(json.dumps(name, ensure_ascii=False)), value), name in required))
        other = self._other_pairs(schema, list(schema.get("properties", {})), pointer)
        least, most = max(0, low - len(pairs)), None if high is None else high - len(pairs)
        if other is None and least:
            self._refuse("minProperties", pointer, "a minimum above the number of named properties")
        return self._members(pairs, other, least, most)

    def _pair(self, key: str, value: str) -> str:
        return self.rules.add(f"{key} {self.colon} {value}")

    def _other_pairs(self, schema: dict, names: list[str], pointer: str) -> str | None:
        """Return an expression for a member with an unnamed key, or None if the schema allows only named
        keys.
        """
        patterns = schema.get("patternProperties", {})
        if len(patterns) > 1:
            # Normalization wrote the patterns' JSON pointer in the original schema into $comment.
            at = schema.get("$comment", f"#{join_pointer(pointer, 'patternProperties')}")
            _refuse_at("patternProperties", at, "several patterns on one string")
        for pattern, part in patterns.items():
            try:
                node = parse_whole_regex(pattern)
            except RegexRefused as error:
                self._refuse("patternProperties", pointer, f"the pattern ({error})")
            if isinstance(node, Chars) and not node.ranges:
                return None
            for name in names:
                self._check_name(name, pattern, pointer)
            value = self.value(part, join_pointer(pointer, "patternProperties", pattern))
            key = self._quoted(pattern, "patternProperties", pointer)
            return self._pair(key, value)
        return None

    def _check_name(self, name: str, pattern: str, pointer: str) -> None:
        try:
            matches = self.budget.matches(pattern[1:-1], name)  # The pattern without ^ and $.
        except PatternError as error:
            self._refuse("patternProperties", pointer, f"the pattern ({error})")
        if matches:
            part = f"a pattern that also matches {name!r}, a name in properties"
            self._refuse("patternProperties", pointer, part)

    def _members(self, pairs: list[tuple[str, bool]], other: str | None, least: int, most: int | None) -> str:
        """Return an expression for an object's members: the named members in order, then `least` to `most`
        other members.
        """
        # Expressions for the rest of the object: after a member, and before the first member.
        after = before = EMPTY
        if other is not None and most != 0:
            after = _times(f"{self.comma} {other}", least, most)
            first = f"{other} {_times(f'{self.comma} {other}', max(0, least - 1), most and most - 1)}"
            before = self.rules.add(first if least else f"{first} | {EMPTY}")
        for pair, is_required in reversed(pairs):
            first = f"{pair} {after}"
            before = self.rules.add(first if is_required else f"{first} | {before}")
            more = f"{self.comma} {pair} {after}"
            after = self.rules.add(more if is_required else f"{more} | {after}")
        return self.rules.add(f"{literal('{')} {self.space} {before} {self.space} {literal('}')}")

    def _refuse(self, keyword: str, pointer: str, part: str, advice: str = ADVICE) -> NoReturn:
        _refuse_at(keyword, join_pointer(pointer, keyword), part, advice)


def _times(body: str, low: int, high: int | None) -> str:
    """Return an expression for `low` to `high` repetitions of `body`. xgrammar's own repetition,
    {low,high}, is fast enough for items and members.
    """
    if high == 0:
        return EMPTY
    return f"({body}){{{low},{'' if high is None else high}}}"
