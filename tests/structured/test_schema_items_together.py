"""Test arrays with contains and uniqueItems at any position in a schema."""

import enum
import json
import random
from functools import reduce
from typing import Literal

import jsonschema
import pytest
from llguidance import LLMatcher
from pydantic import BaseModel

from mmengine.errors import InvalidRequest
from mmengine.request import GrammarRequest
from mmengine.structured_output.closing.closings import Closings
from mmengine.structured_output.closing.hints import hints_of
from mmengine.structured_output.closing.search import Vocabulary
from mmengine.structured_output.engines.llguidance.json_schema_lark import lark_of
from mmengine.structured_output.json_schema.normalization import Bounds, SchemaRefused, normalize_schema
from tests.structured.accepting import TOKENIZER, Grammar

ITEMS: list[dict | bool] = [
    {"enum": ["a", "b", "c"]},
    {"type": "boolean"},
    {"type": "integer", "minimum": 0, "maximum": 4},
    {"enum": [None, 1, "x", [1], {"k": 1}]},
    {"anyOf": [{"type": "boolean"}, {"enum": ["a", 2, 3]}]},
    {"enum": list(range(9))},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 1},
    {"type": "object", "properties": {"k": {"enum": [1, 2]}}, "additionalProperties": False},
    {"type": "string"},
    True,
]
HELD: list[dict | bool] = [
    {"const": "a"},
    {"enum": [1, 2, "b"]},
    {"type": "boolean"},
    {"type": "integer", "minimum": 2},
    {"type": "string", "pattern": "^a"},
    {"const": [1]},
    {"type": "object"},
    True,
]
VALUES = [None, True, False, 0, 1, 2, 3, 4, 7, "a", "b", "c", "x", [1], [True], [], {"k": 1}, {"k": 2}]


def an_array(source: random.Random) -> dict:
    schema: dict = {"type": "array"}
    if source.random() < 0.3:
        schema["prefixItems"] = source.choices(ITEMS, k=source.randint(1, 3))
    if source.random() < 0.8:
        schema["items"] = source.choice([*ITEMS, False] if "prefixItems" in schema else ITEMS)
    if source.random() < 0.6:
        schema["uniqueItems"] = True
    if source.random() < 0.3:
        schema["minItems"] = source.randint(0, 3)
    if source.random() < 0.4:
        schema["maxItems"] = schema.get("minItems", 0) + source.randint(0, 3)
    if source.random() < 0.5:
        schema |= {"contains": source.choice(HELD), "minContains": source.randint(0, 3)}
    if source.random() < 0.2:
        schema["maxContains"] = source.randint(1, 3)
    return schema


def around(source: random.Random, inner: dict) -> tuple[dict, str, str]:
    """Return a schema that contains the array schema `inner`, and the texts before and after the array."""
    named = {"n": {"type": "integer"}, "v": inner, "w": {"type": "null"}}
    patterns = {"^x": inner, "^y": {"type": "null"}}
    return source.choice(
        [
            (inner, "", ""),
            ({"type": "object", "properties": named, "required": ["n"]}, '{"n": 1, "v": ', ', "z": [1]}'),
            (
                {"type": "object", "properties": named, "additionalProperties": {"type": "boolean"}},
                '{"v": ',
                ', "w": null, "z": true, "x": false}',
            ),
            ({"anyOf": [{"type": "string"}, inner]}, "", ""),
            ({"type": "array", "items": {"$ref": "#/$defs/s"}, "$defs": {"s": inner}}, "[[], ", "]"),
            ({"type": "object", "patternProperties": patterns}, '{"xa": ', ', "ya": null, "z": 1}'),
            ({"type": "object", "properties": {"next": {"$ref": "#"}, "v": inner}}, '{"next": {"v": ', "}}"),
        ]
    )


def test_random_arrays() -> None:
    assert sum(is_enforced(seed) for seed in range(40)) > 28


def is_enforced(seed: int) -> bool:
    """Return whether the random schema of `seed` is accepted. If so, check that the grammar enforces the
    schema.
    """
    source = random.Random(seed)
    schema, before, behind = around(source, an_array(source))
    referee = jsonschema.Draft202012Validator(schema)
    try:
        grammar = Grammar(schema, Bounds() if seed % 3 == 0 else Bounds.off())
    except InvalidRequest:
        return False
    for _ in range(25):
        pool = source.choice([VALUES, ["a", "b", "c"], [True, False, None], [0, 1, 2, 3, 4]])
        instance = source.choices(pool, k=source.randint(0, 5))
        text = f"{before}{json.dumps(instance)}{behind}"
        assert grammar.accepts(text) == referee.is_valid(json.loads(text)), (schema, text)
    text = grammar.walk(source, 200)
    if text is not None:
        referee.validate(json.loads(text))
    return True


def test_many_values_are_bits_of_a_parameter() -> None:
    # A parameter of the Lark grammar has a bit for each value: whether the array already contains the value.
    months = [f"m{at}" for at in range(60)]
    array = {"type": "array", "items": {"enum": months}, "uniqueItems": True, "minItems": 2, "maxItems": 59}
    grammar = Grammar({**array, "contains": {"enum": months[:3]}, "minContains": 2})
    assert grammar.accepts(json.dumps(["m0", *months[4:59], "m2"]))
    assert not grammar.accepts(json.dumps(["m0", *months[4:59], "m5"]))
    assert not grammar.accepts(json.dumps(months))
    assert not grammar.accepts(json.dumps(["m0"] + months[3:59]))  # No room is left for a required item.


def test_no_path_leads_to_an_impossible_item() -> None:
    # The masks refuse an item after which the array could not contain both "a" and "b".
    array = {"type": "array", "items": {"enum": list("abcdefgh")}, "uniqueItems": True}
    grammar = Grammar({**array, "contains": {"enum": ["a", "b"]}, "minContains": 2, "maxItems": 3})
    for seed in range(30):
        text = grammar.walk(random.Random(seed), 300)
        assert text is None or {"a", "b"} <= set(json.loads(text))


@pytest.mark.parametrize("said", ["", "[", '["b"', '["c","a",', '[ "d", "b", "e" ,"c"'])
def test_every_path_ends(said: str) -> None:
    schema = {"type": "array", "items": {"enum": list("abcdefgh")}, "uniqueItems": True, "minItems": 4}
    grammar = Grammar(schema)
    matcher, tokens = grammar.matcher.deep_copy(), list(said.encode())
    assert matcher.consume_tokens(tokens)
    vocabulary = Vocabulary([bytes([byte]) for byte in range(256)] + [b""])
    closings = Closings(vocabulary, hints_of(GrammarRequest("json_schema", grammar.text)))
    path = closings.closing(matcher, reduce(closings.advance, tokens, closings.begin()), 4096)
    assert path is not None
    jsonschema.validate(json.loads(said.encode() + bytes(path)), schema)


def test_sets_of_pydantic() -> None:
    class Size(enum.Enum):
        SMALL, LARGE = "s", "l"

    class Order(BaseModel):
        colours: set[Literal["red", "green", "blue", "black", "white"]]
        flags: set[bool]
        sizes: frozenset[Size]

    grammar = Grammar(Order.model_json_schema())
    assert grammar.accepts('{"colours":["red","blue"],"flags":[true,false],"sizes":["l"]}')
    for wrong in ('["red","red"],"flags":[]', '["red"],"flags":[true,true]'):
        assert not grammar.accepts(f'{{"colours":{wrong},"sizes":[]}}')


def test_the_engine_refuses_the_automaton_as_json_schema() -> None:
    # `contains` is normalized to an automaton, which the grammar engine can enforce only as a Lark grammar.
    text = normalize_schema({"type": "array", "contains": {"const": 1}}).text
    assert lark_of(text) is not None
    as_it_is = LLMatcher(TOKENIZER, LLMatcher.grammar_from_json_schema(text), log_level=0)
    assert as_it_is.is_error()


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"items": {"type": "string"}, "uniqueItems": True}, "no list of values"),
        ({"prefixItems": [{"type": "string"}, {"const": "a"}], "uniqueItems": True, "items": False}, "same"),
        ({"items": {"enum": list(range(70))}, "uniqueItems": True}, "no list"),
        ({"items": {"type": "boolean"}, "uniqueItems": True, "minItems": 3}, "no array has enough items"),
        ({"contains": {"type": "null"}, "minContains": 3, "maxItems": 2}, "no array has enough items"),
        ({"contains": {"type": "null"}, "minContains": 90_000}, "4,096 steps"),
    ],
)
def test_refused_with_the_reason(schema: dict, why: str) -> None:
    with pytest.raises(SchemaRefused, match=why) as caught:
        normalize_schema(
            {"type": "object", "properties": {"a": {"type": "array", **schema}}, "required": ["a"]}
        )
    assert caught.value.keyword in ("uniqueItems", "contains")
    assert caught.value.pointer == f"#/properties/a/{caught.value.keyword}"
