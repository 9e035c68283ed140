"""Tests the bounds on strings, keys and numbers, and that bounds can be turned off."""

import gc
from contextlib import suppress
from typing import Any

import pytest

from mmengine.structured_output.json_schema import normalization
from mmengine.structured_output.json_schema.normalization import Bounds, normalize_schema
from tests.structured.accepting import UNBOUND, Grammar

OPEN = {"type": "object", "properties": {"a": {"type": "integer"}}}
CASES = [
    # schema, a text within the bounds, a text beyond them
    ({"type": "array"}, "[" + " " * 32 + "1]", "[" + " " * 33 + "1]"),
    ({"type": "string"}, '"' + "x" * 4096 + '"', '"' + "x" * 4097 + '"'),
    ({"type": "string", "pattern": "^x+$"}, '"' + "x" * 4096 + '"', '"' + "x" * 4097 + '"'),
    ({"type": "integer"}, "9" * 17, "9" * 18),
    ({"type": "number"}, "-99999.0123456789", "0.01234567890"),
    ({"type": "number"}, "9999999999999.25", "1e5"),
    ({"type": "number"}, "9" * 17 + "." + "9" * 10, "9" * 18),
    ({"type": "number", "minimum": 0}, "9" * 17, "9" * 18),
    ({"type": "object"}, '{"' + "k" * 64 + '":1}', '{"' + "k" * 65 + '":1}'),
    (OPEN, '{"' + "k" * 64 + '":1}', '{"' + "k" * 70 + '":1}'),
    (True, '["' + "x" * 4096 + '"]', '["' + "x" * 4097 + '"]'),
    ({"type": "object"}, '{"a":[{"b":1}]}', '{"a":[{"b":' + "9" * 18 + "}]}"),
]


@pytest.mark.parametrize(("schema", "within", "beyond"), CASES)
def test_bounds(schema: dict | bool, within: str, beyond: str) -> None:
    bounded, unbounded = Grammar(schema, Bounds(string=4096, key=64, digits=17)), Grammar(schema)
    assert bounded.accepts(within) and not bounded.accepts(beyond)
    assert unbounded.accepts(within) and unbounded.accepts(beyond)


@pytest.mark.parametrize(
    ("schema", "within", "beyond"),
    [
        # Integers have no default bound, because ids may be long.
        ({"type": "integer"}, "-" + "9" * 20, "1.0"),
        ({"type": "number"}, "-" + "9" * 20 + ".0123456789", "0.01234567890"),
        ({"type": "number"}, "12", "1e5"),
        ({"type": "number", "minimum": 0}, "9" * 20 + ".0123456789", "0.01234567890"),
        ({"type": "number", "exclusiveMaximum": 10**6}, "999999.12345678", "999999.123456789"),
        ({"type": "number", "exclusiveMaximum": 10**15}, "9999999999999.99", "99999999999999.99"),
        ({"type": "number", "exclusiveMaximum": 10**15}, "9" * 15, "1.125"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1e-9}, "0.0000000001", "0.00000000011"),
        ({"type": "number", "multipleOf": 0.3}, "99999999999999.9", "999999999999999.9"),
        ({"type": "number", "multipleOf": 0.3}, "9" * 20, "1.1"),
    ],
)
def test_a_fraction_ends_by_default(schema: dict, within: str, beyond: str) -> None:
    """A number with an exclusive limit has at most as many digits as a double represents exactly."""
    grammar = Grammar(schema, Bounds())
    assert grammar.accepts(within) and not grammar.accepts(beyond), grammar.text


def test_a_number_that_no_fraction_fits_is_left_as_it_is() -> None:
    # No number within the default bound on decimals is in the range, so the bound does not apply.
    schema = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1e-10}
    assert Grammar(schema, Bounds()).accepts("0.00000000005")


def test_an_unrestricted_value_may_be_anything() -> None:
    """All unrestricted schemas are normalized to the same text."""
    for anything in (True, {}, {"title": "x"}):
        schema = {"type": "object", "properties": {"a": anything}, "additionalProperties": anything}
        assert (
            normalize_schema(schema).text
            == normalize_schema({"type": "object", "properties": {"a": True}}).text
        )


@pytest.mark.parametrize("schema", [True, {"type": "object"}, OPEN])
def test_no_default_bound_slows_masks(schema: dict | bool) -> None:
    """With a bound, each character would lead to a new lexer state without a cached mask."""
    value = '["' + "x" * 5000 + '",' + "9" * 30 + "]"
    assert Grammar(schema, Bounds()).accepts('{"' + "k" * 200 + '":' + value + "}")


def test_the_schema_wins_over_a_bound() -> None:
    bounds = Bounds(string=10, digits=3)
    assert Grammar({"type": "string", "minLength": 20}, bounds).accepts('"' + "x" * 20 + '"')
    assert Grammar({"type": "string", "maxLength": 20}, bounds).accepts('"' + "x" * 20 + '"')
    assert Grammar({"type": "integer", "minimum": 5_000}, bounds).accepts("123456")
    assert Grammar({"const": 123456}, bounds).accepts("123456")


def test_bounds_are_checked() -> None:
    with pytest.raises(ValueError, match="string"):
        Bounds(string=-1)
    for wrong in ({"digits": 30}, {"decimals": 11}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Bounds(**wrong)


def test_garbage_collection_pauses_during_normalization(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def read(*given: Any) -> Any:
        seen.append(gc.isenabled())
        if len(seen) == 1:
            with suppress(normalization.SchemaRefused):
                normalize_schema(False)  # Simulates another thread that normalizes a schema.
            seen.append(gc.isenabled())
        return known(*given)

    known = normalization.read_schema
    monkeypatch.setattr(normalization, "read_schema", read)
    for schema in (True, {"enum": []}):
        with suppress(normalization.SchemaRefused):
            normalize_schema(schema)
    assert seen == [False] * 4 and gc.isenabled()
    gc.disable()
    try:
        normalize_schema(True)
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("bounds", [Bounds(), Bounds(ordered=0), UNBOUND])
@pytest.mark.parametrize("number", [3.3, -37.8])
def test_a_range_of_a_single_number_contains_that_number(number: float, bounds: Bounds) -> None:
    """llguidance alone finds no number from 3.3 to 3.3."""
    grammar = Grammar({"type": "number", "minimum": number, "maximum": number}, bounds)
    assert grammar.accepts(str(number))
    assert not any(grammar.accepts(str(round(number + more, 1))) for more in (-0.1, 0.1))


def test_a_range_in_which_the_engine_finds_nothing_is_no_error_beside_objects_in_any_order() -> None:
    """The minimum -19.91 adds a range that contains only -19.9. llguidance finds no number in this range, and
    once rejected the whole Lark grammar.
    """
    key = {"type": "object", "properties": {"a b": {"type": "null"}}, "required": ["a b"]}
    schema = {"anyOf": [key, {"type": "number", "minimum": -19.91, "maximum": -3.96}, {"type": "null"}]}
    grammar = Grammar(schema, Bounds(ordered=0))
    for text in ("-19.9", "-19.91", "-3.96", "-4", "null", '{"a b":null}', '{"c":1,"a b":null}'):
        assert grammar.accepts(text), text
    assert not any(grammar.accepts(text) for text in ("-19.92", "-3.95", "1", "{}"))
