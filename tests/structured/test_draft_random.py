"""Tests random schemas in all JSON Schema drafts: the draft's validator accepts each value that the masks
accept.
"""

import json
import random

import pytest
from jsonschema.validators import validator_for
from referencing.exceptions import Unresolvable

from mmengine.structured_output.json_schema.normalization import SchemaRefused
from tests.structured.accepting import Grammar

DRAFTS = [
    *(f"http://json-schema.org/draft-0{at}/schema#" for at in (4, 6, 7)),
    "https://json-schema.org/draft/2019-09/schema",
    "https://json-schema.org/draft/2020-12/schema",
]
NAMES = "abc"


class Source:
    """Makes random schemas and values, small enough to match often."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)

    def schema(self, depth: int) -> dict:
        if depth == 0:
            return self.random.choice(
                [{}, {"type": "integer", "minimum": 2}, {"minimum": 2}, {"type": "null"}]
            )
        out: dict = {}
        for _ in range(self.random.randint(1, 4)):
            keyword = self.random.choice(list(KEYWORDS))
            out[keyword] = KEYWORDS[keyword](self, depth - 1)
        return out

    def value(self, depth: int) -> object:
        kind = self.random.random()
        if depth and kind < 0.4:
            names = sorted(self.random.sample(NAMES, self.random.randint(0, 3)))
            return {name: self.value(depth - 1) for name in names}
        if depth and kind < 0.7:
            return [self.value(depth - 1) for _ in range(self.random.randint(0, 3))]
        return self.random.choice([None, 1, 2, 4, "a", True])

    def name(self) -> str:
        return self.random.choice(NAMES)


KEYWORDS = {
    "type": lambda s, d: s.random.choice(["integer", "object", "array", ["integer", "null"]]),
    "items": lambda s, d: s.random.choice(
        [s.schema(d), [s.schema(d) for _ in range(s.random.randint(1, 2))]]
    ),
    "additionalItems": lambda s, d: s.random.choice([False, s.schema(d)]),
    "prefixItems": lambda s, d: [s.schema(d)],
    "dependencies": lambda s, d: {s.name(): s.random.choice([[s.name()], s.schema(d)])},
    "dependentRequired": lambda s, d: {s.name(): [s.name()]},
    "properties": lambda s, d: {name: s.schema(d) for name in NAMES[: s.random.randint(1, 3)]},
    "required": lambda s, d: [s.name()],
    "const": lambda s, d: s.random.choice([1, "a", None]),
    "minimum": lambda s, d: s.random.randint(0, 3),
    "exclusiveMinimum": lambda s, d: s.random.choice([True, False, 1]),
    "$ref": lambda s, d: s.random.choice(
        ["#/definitions/a", "#/foo", "#/foo/b", "#a", "x", "x#/definitions/a"]
    ),
    "definitions": lambda s, d: {"a": s.schema(d)},
    "foo": lambda s, d: {**s.schema(d), "b": s.schema(d)},
    "id": lambda s, d: s.random.choice(["#a", "x"]),
    "$id": lambda s, d: s.random.choice(["#a", "x"]),
    "$anchor": lambda s, d: "a",
    "allOf": lambda s, d: [s.schema(d)],
    "anyOf": lambda s, d: [s.schema(d), s.schema(d)],
}


@pytest.mark.parametrize("draft", DRAFTS)
def test_accepted_values_are_valid_in_their_draft(draft: str) -> None:
    source = Source(7)
    compared, accepted = {True: 0, False: 0}, 0
    for _ in range(120):
        schema = {"$schema": draft, **source.schema(3)}
        try:
            grammar = Grammar(schema)
        except SchemaRefused:
            continue
        validator = validator_for(schema)(schema)
        for _ in range(6):
            value = source.value(2)
            try:
                valid = validator.is_valid(value)
            except (Unresolvable, TypeError):  # jsonschema finds invalid references only now.
                continue
            if grammar.accepts(json.dumps(value)):
                assert valid, (schema, value)
                accepted += 1
            compared[valid] += 1
    assert min(compared.values()) > 60 and accepted > 250, (compared, accepted)
