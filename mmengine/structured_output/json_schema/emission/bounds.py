"""Bounds on generated JSON that the schema itself does not set."""

import msgspec

MAX_PLACES = 10  # Maximum of Bounds.decimals: the grammar engine cannot enforce finer steps exactly.
MAX_DIGITS = 17  # Maximum of Bounds.digits: the grammar engine rejects longer ranges.
MAX_RUN = 10_000  # Maximum of Bounds.max_digits.


class Bounds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits that narrow a schema's language; 0 switches a limit off. With all limits off the language is
    exactly the schema's.

    A bound never contradicts the schema: if the schema requires more (a minLength, a range of numbers), the
    schema wins.
    """

    whitespace: int = 32  # Maximum number of white-space characters in a row between JSON tokens.
    string: int = 0  # Maximum number of characters in a string without maxLength.
    decimals: int = 10  # Maximum number of decimal places; a number then has no exponent.
    # Maximum number of digits of an integer, or before the decimal point. If set, a fraction has at most 15
    # digits in all.
    digits: int = 0
    # Maximum number of digits of an integer, and of each part of another number, if neither the schema nor
    # `digits` limits them. None: the engine's setting `max_digits`.
    max_digits: int | None = None
    key: int = 0  # Maximum number of characters of a key that the schema does not name.
    # Objects with up to this many named properties keep the schema's order of keys. A larger object keeps the
    # order if all its properties are required. 0: any order. For small grammars any order would double the
    # compile time.
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
