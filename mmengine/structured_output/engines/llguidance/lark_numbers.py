"""Writes Lark terminals for numbers with a maximum number of digits.

In a JSON schema, llguidance can limit the digits only by a range, whose limits have at most 18 digits.
llguidance compiles such a range into an alternative for each length. A Lark terminal needs only a state for
each digit.
"""

from fractions import Fraction

from mmengine.structured_output.engines.unlimited_numbers import HIGH, LOW, limit_of, multiple_of
from mmengine.structured_output.json_schema.patterns.other_keys import Json
from mmengine.structured_output.json_schema.vocabulary.keywords import count_decimals

# Largest n for which a range may end at 10**n. llguidance reads limits as floats, which have 17 digits.
MAX_POWER = 17


def limited_number(schema: Json, most: int) -> tuple[str, Json | None]:
    """Return a terminal for a number's schema, and a schema for the numbers that the terminal does not match.

    Integer part, decimals and exponent may each have at most `most` digits. A schema with a single limit is
    split at a power of ten: the returned schema covers the numbers from the limit to this power, and the
    terminal covers the numbers beyond. The returned schema is None if the terminal suffices. The terminal is
    "" if the limit has too many digits.
    """
    low, high = limit_of(schema, LOW), limit_of(schema, HIGH)
    any_digits, behind = f"(0|[1-9][0-9]{{0,{most - 1}}})", _places(schema, most)
    if low is None and high is None:
        return f"/-?{any_digits}{behind}/", None
    if low == 0 and "minimum" in schema:
        return f"/{any_digits}{behind}/", None
    sign, limit = ("", low) if low is not None else ("-", -high if high is not None else Fraction(0))
    # A number must lie between the limit and this power of ten, because llguidance refuses an empty range.
    power = len(str(int(limit))) + 1 if limit >= 0 else 0
    if power > min(most - 1, MAX_POWER):
        return "", schema
    is_whole = schema["type"] == "integer"
    keyword = ("minimum" if sign else "maximum") if is_whole else HIGH[1] if not sign else LOW[1]
    end = 10**power - is_whole
    return f"/{sign}[1-9][0-9]{{{power},{most - 1}}}{behind}/", {**schema, keyword: -end if sign else end}


def _places(schema: Json, most: int) -> str:
    """Return the regular expression for the decimal places and the exponent."""
    if schema["type"] == "integer":
        return ""
    multiple = multiple_of(schema)
    if multiple is not None:
        places = min(most, count_decimals(multiple))
        return rf"(\.[0-9]{{1,{places}}})?" if places else ""
    has_limit = any(name in schema for name in (*LOW, *HIGH))
    exponent = "" if has_limit else f"([eE][+-]?[0-9]{{1,{most}}})?"
    return rf"(\.[0-9]{{1,{most}}})?{exponent}"
