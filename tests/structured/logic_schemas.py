"""Makes random schemas with logical keywords (not, oneOf, if, dependentSchemas, unevaluated…) and three
property names.
"""

import json
import random
from collections.abc import Iterator

from llguidance import LLMatcher

from tests.structured.accepting import END, Grammar, allowed

NAMES = "abc"
SCALARS: list[dict | bool] = [
    *({"type": "string"}, {"type": "integer"}, {"type": "number"}, {"type": "boolean"}),
    *({"const": 1}, {"const": "x"}, {"const": None}, {"enum": ["x", "y", 1]}, {"enum": [1, 2, 3]}),
    *({"minimum": 2}, {"maximum": 3}, {"multipleOf": 2}, {"type": "integer", "exclusiveMinimum": 1}),
    *({"type": "integer", "minimum": 0, "maximum": 4}, {"type": ["string", "null"]}),
    *({"minLength": 2}, {"maxLength": 1}, {"pattern": "^x"}, {"pattern": "^(x|y)+$"}, True, False),
]
ATOMS = [None, True, False, 0, 1, 2, 3, 4, 5, -1, 0.5, 1.5, "", "x", "y", "xy", "z", "zz"]
KEYWORDS = (
    *("not", "oneOf", "anyOf", "allOf", "if", "dependentRequired", "dependentSchemas", "$ref"),
    *("unevaluatedProperties", "unevaluatedItems"),
)


class Source:
    def __init__(self, seed: int):
        self.random = random.Random(seed)

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def names(self) -> list[str]:
        return self.random.sample(NAMES, self.random.randint(1, 2))

    def document(self) -> dict:
        depth = self.random.choice([1, 2, 2, 3])
        return {
            **self.logic(depth),
            "$defs": {"p": self.schema(depth - 1), "q": self.schema(depth - 1)},
        }

    def schema(self, depth: int) -> dict | bool:
        if depth <= 0 or self.chance(0.2):
            return self.random.choice(SCALARS)
        make = self.random.choice([self.object, self.object, self.logic, self.logic, self.array])
        return make(depth)

    def object(self, depth: int) -> dict:
        out: dict = {}
        if self.chance(0.7):
            out["properties"] = {name: self.schema(depth - 1) for name in self.names()}
        if self.chance(0.5):
            out["required"] = self.names()
        if self.chance(0.3):
            out["additionalProperties"] = self.random.choice([False, {"type": "integer"}])
        if self.chance(0.4):
            out["type"] = "object"
        return out

    def array(self, depth: int) -> dict:
        out: dict = {}
        if self.chance(0.6):
            out["items"] = self.schema(depth - 1)
        if self.chance(0.4):
            out["prefixItems"] = [self.schema(depth - 1)]
        if self.chance(0.4):
            out |= {"type": "array", "maxItems": 2}
        return out

    def logic(self, depth: int) -> dict:
        out: dict = {}
        for keyword in self.random.sample(KEYWORDS, self.random.randint(1, 2)):
            if keyword == "not":
                out[keyword] = self.schema(depth - 1)
            elif keyword in ("oneOf", "anyOf", "allOf"):
                out[keyword] = [self.schema(depth - 1) for _ in range(self.random.randint(2, 3))]
            elif keyword == "if":
                for each in ("if", *(name for name in ("then", "else") if self.chance(0.7))):
                    out[each] = self.schema(depth - 1)
            elif keyword == "dependentRequired":
                out[keyword] = {name: self.names() for name in self.names()}
            elif keyword == "dependentSchemas":
                out[keyword] = {name: self.schema(depth - 1) for name in self.names()}
            elif keyword == "$ref":
                out[keyword] = "#/$defs/" + self.random.choice("pq")
            else:
                out[keyword] = self.random.choice([False, {"type": "integer"}])
        return out | (self.object(depth) if self.chance(0.4) else {})

    def instance(self, depth: int = 2) -> object:
        if depth <= 0 or self.chance(0.35):
            return self.random.choice(ATOMS)
        if self.chance(0.7):
            names = self.random.sample(NAMES + "d", self.random.randint(0, 3))
            return {name: self.instance(depth - 1) for name in names}
        return [self.instance(depth - 1) for _ in range(self.random.randint(0, 3))]


def accepts_some_order(grammar: Grammar, value: object) -> bool:
    """Return whether the grammar accepts `value` with some key order."""
    return any(END in allowed(matcher) for matcher in _after(grammar.matcher.deep_copy(), value))


def _after(matcher: LLMatcher, value: object) -> Iterator[LLMatcher]:
    """Yield the matcher's state after each accepted text for `value`."""
    if isinstance(value, dict):
        yield from _members(matcher, value, list(value))
    elif isinstance(value, list):
        yield from _items(matcher, value, 0)
    else:
        yield from _read(matcher, json.dumps(value, ensure_ascii=False))


def _members(matcher: LLMatcher, value: dict, left: list[str]) -> Iterator[LLMatcher]:
    start = "{" if len(left) == len(value) else ","
    if not left:
        yield from _read(matcher, "{}" if not value else "}")
    for name in left:
        for behind in _read(matcher, f"{start}{json.dumps(name, ensure_ascii=False)}:"):
            for after in _after(behind, value[name]):
                yield from _members(after, value, [each for each in left if each != name])


def _items(matcher: LLMatcher, value: list, at: int) -> Iterator[LLMatcher]:
    if at == len(value):
        yield from _read(matcher, "[]" if not value else "]")
        return
    for behind in _read(matcher, "," if at else "["):
        for after in _after(behind, value[at]):
            yield from _items(after, value, at + 1)


def _read(matcher: LLMatcher, text: str) -> Iterator[LLMatcher]:
    matcher = matcher.deep_copy()
    if all(byte in allowed(matcher) and matcher.consume_token(byte) for byte in text.encode()):
        yield matcher
