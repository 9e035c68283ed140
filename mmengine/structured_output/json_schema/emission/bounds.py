"""Defines limits on generated JSON, such as on white space, in addition to the schema's own limits."""

import msgspec

# Maximum value of Bounds.decimals, because the grammar engine cannot enforce finer steps exactly.
MAX_PLACES = 10
MAX_DIGITS = 17  # Maximum value of Bounds.digits, because the grammar engine rejects larger ranges.
MAX_RUN = 10_000  # Maximum value of Bounds.max_digits.


class Bounds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits that exclude some values that the schema allows. 0 switches a limit off.

    If the schema requires more than a limit allows, for example by minLength, the schema takes precedence.
    """

    whitespace: int = 32  # Maximum number of white-space characters in a row between JSON tokens.
    string: int = 0  # Maximum number of characters in a string without maxLength.
    decimals: int = 10  # Maximum number of decimal places. With this limit, numbers have no exponent.
    # Maximum number of digits in an integer, or before the decimal point. If set, a number with decimal
    # places has at most 15 digits in all.
    digits: int = 0
    # Maximum number of digits in each part of a number, if neither the schema nor `digits` limits the number.
    # None: the engine's setting `max_digits`.
    max_digits: int | None = None
    key: int = 0  # Maximum number of characters in a key that the schema does not name.
    # Objects with at most this many named properties have their keys in schema order. Allowing other orders
    # would double the compile time of small grammars. Larger objects have their keys in schema order only if
    # all properties are required. 0: objects of every size may have any order.
    ordered: int = 4

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"Bounds.{name} is {getattr(self, name)}; it must be 0 (off) or more")
        limits = {"decimals": MAX_PLACES, "digits": MAX_DIGITS, "max_digits": MAX_RUN}
        for name, most in limits.items():
            if (getattr(self, name) or 0) > most:
                raise ValueError(
                    f"Bounds.{name} is {getattr(self, name)}; it must be at most {most}, or 0 (off)"
                )

    @classmethod
    def off(cls) -> "Bounds":
        return cls(whitespace=0, string=0, decimals=0, digits=0, max_digits=0, key=0, ordered=0)
