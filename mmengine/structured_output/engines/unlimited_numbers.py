"""Finds normalized schemas that allow numbers with any number of digits, and reads numeric limits."""

from collections.abc import Sequence
from fractions import Fraction

import msgspec

from mmengine.structured_output.json_schema.patterns.other_keys import Json, expand_other_keys
from mmengine.structured_output.json_schema.reading.translation import subschemas
from mmengine.structured_output.json_schema.vocabulary.keywords import count_decimals, to_fraction

# A schema with more characters is put into a Lark grammar, which llguidance parses without the GIL.
MAX_HELD = 64 * 2**10
LOW, HIGH = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")


def has_unlimited_numbers(text: str) -> bool:
    """Return whether a normalized schema allows numbers with any number of digits."""
    schema: Json = msgspec.json.decode(text, type=dict)
    del schema["x-guidance"]
    definitions = schema.pop("$defs", {})
    assert isinstance(definitions, dict)
    return any(_has_unlimited(each) for each in (schema, *definitions.values()))


def _has_unlimited(schema: object) -> bool:
    if schema is True or schema == {}:
        return True
    if not isinstance(schema, dict) or "enum" in schema or "const" in schema:
        return False
    return is_unlimited(schema) or any(
        _has_unlimited(child) for _, child in subschemas(expand_other_keys(schema, spelled_out=False))
    )


def is_unlimited(schema: Json) -> bool:
    """Return whether a normalized schema allows a number with any number of digits.

    A schema with `multipleOf` counts as limited, although the multiples may have any number of digits. For
    the type number, a `multipleOf` of 1, 0.1, 0.01 and so on is no limit, because the value restricts only
    the decimal places.
    """
    if schema.get("type") not in ("integer", "number"):
        return False
    if limit_of(schema, LOW) is not None and limit_of(schema, HIGH) is not None:
        return False
    multiple = multiple_of(schema)
    if multiple is None:
        return True
    return schema["type"] == "number" and multiple == Fraction(1, 10 ** count_decimals(multiple))


def limit_of(schema: Json, names: Sequence[str]) -> Fraction | None:
    """Return the value of the first keyword in `names` that a number's schema has, or None."""
    found = next((schema[name] for name in names if name in schema), None)
    return to_fraction(found) if isinstance(found, int | float) else None


def multiple_of(schema: Json) -> Fraction | None:
    """Return the value of `multipleOf`, or None."""
    found = schema.get("multipleOf")
    return to_fraction(found) if isinstance(found, int | float) else None
