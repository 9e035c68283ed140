"""What is bounded in generated JSON although the schema does not bound it."""

import msgspec

MAX_PLACES = 10  # of Bounds.decimals: finer steps the grammar engine cannot take exactly
MAX_DIGITS = 17  # of Bounds.digits: longer ranges it cannot take


class Bounds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Each narrows the language of a schema; 0 switches one off. With all off it is exactly the schema's.

    A bound never contradicts the schema: where the schema itself asks for more (a minLength, a range of
    numbers), the schema wins.
    """

    whitespace: int = 32  # characters of white space in a row between tokens of the JSON text
    string: int = 0  # characters of a string without maxLength
    decimals: int = 10  # digits behind the point; a number has no exponent then
    digits: int = 0  # of an integer, or before the point; beside a limit a fraction has at most 15 in all
    key: int = 0  # characters of a key that the schema does not name
    # Named properties of an object up to which they come in the schema's order, and so do more where all of
    # them are required; 0: in any order. For small grammars any order would double the time to compile them.
    ordered: int = 4

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) < 0:
                raise ValueError(f"Bounds.{name} is {getattr(self, name)}; it must be 0 (off) or more")
        for name, most in (("decimals", MAX_PLACES), ("digits", MAX_DIGITS)):
            if getattr(self, name) > most:
                raise ValueError(
                    f"Bounds.{name} is {getattr(self, name)}; it must be at most {most}, or 0 (off)"
                )

    @classmethod
    def off(cls) -> "Bounds":
        return cls(whitespace=0, string=0, decimals=0, digits=0, key=0, ordered=0)
