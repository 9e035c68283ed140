"""How a schema is refused: which keyword, where, and why."""

from typing import NoReturn

from mmengine.errors import ErrorCode, InvalidRequest


class SchemaRefused(InvalidRequest):
    """A schema that is no schema, allows nothing, or cannot be enforced exactly.

    `keyword` is the keyword at fault ("" for the schema as a whole), `pointer` the JSON pointer of the
    place (RFC 6901; "#" is the root).
    """

    code = ErrorCode.INVALID_GRAMMAR

    def __init__(self, keyword: str, pointer: str, why: str):
        super().__init__(f"schema refused: {keyword + ' ' if keyword else ''}at {pointer}: {why}")
        self.keyword = keyword
        self.pointer = pointer
        self.why = why


def refuse(keyword: str, pointer: str, why: str) -> NoReturn:
    raise SchemaRefused(keyword, shown_pointer(pointer), why)


def shown_pointer(pointer: str) -> str:
    """A pointer as it is shown: with its #, which one into another document has behind that one's URI."""
    return f"#{pointer}" if pointer[:1] in ("", "/") else pointer


def step(pointer: str, *names: str | int) -> str:
    """The pointer of something below `pointer`, escaped as RFC 6901 says."""
    for name in names:
        text = str(name)
        if "~" in text or "/" in text:
            text = text.replace("~", "~0").replace("/", "~1")
        pointer = f"{pointer}/{text}"
    return pointer
