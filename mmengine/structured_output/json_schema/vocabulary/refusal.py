"""The errors for unsupported schemas, with the keyword, the JSON pointer and the reason."""

from typing import NoReturn

from mmengine.errors import ErrorCode, InvalidRequest


class SchemaRefused(InvalidRequest):
    """Raised for a schema that is invalid, allows no value, or cannot be enforced exactly.

    `keyword`: the faulty keyword ("" for the whole schema). `pointer`: the JSON pointer to the fault (RFC
    6901; "#" is the root). `why`: the reason.
    """

    code = ErrorCode.INVALID_GRAMMAR

    def __init__(self, keyword: str, pointer: str, why: str):
        super().__init__(f"schema refused: {keyword + ' ' if keyword else ''}at {pointer}: {why}")
        self.keyword = keyword
        self.pointer = pointer
        self.why = why


class UnenforceablePart(SchemaRefused):
    """Raised for a valid subschema that cannot be enforced. An anyOf can omit such a subschema."""


def refuse(keyword: str, pointer: str, why: str) -> NoReturn:
    """Raise SchemaRefused. `pointer` has no leading "#"."""
    raise SchemaRefused(keyword, format_pointer(pointer), why)


def format_pointer(pointer: str) -> str:
    """Return the pointer with a leading "#", unless the pointer begins with another document's URI."""
    return f"#{pointer}" if pointer[:1] in ("", "/") else pointer
