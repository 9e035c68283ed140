"""What the gate says beside the schema: which keywords annotate only, though they look like assertions."""

import msgspec

from mmengine.structured_output.json_schema.formats import FORMATS
from mmengine.structured_output.json_schema.keywords import ELDERS, KNOWN, shown
from mmengine.structured_output.json_schema.refusal import step

MAX_NOTES = 100  # of one schema


class Note(msgspec.Struct, frozen=True):
    """`pointer`: a JSON pointer (RFC 6901) to what the note speaks of, "#" for the root."""

    keyword: str
    pointer: str
    text: str


class Gated(msgspec.Struct, frozen=True):
    """What the gate makes of a schema: JSON text for the grammar engine, and what to know about it."""

    text: str
    notes: tuple[Note, ...] = ()


def notes_of(schemas: list[tuple[dict | bool, str]]) -> tuple[Note, ...]:
    """Of the schemas of a document, each with its pointer; MAX_NOTES at most, the last of them says so."""
    out: list[Note] = []
    for schema, pointer in schemas:
        for keyword, value in schema.items() if isinstance(schema, dict) else ():
            text = _text(keyword, value)
            if text:
                out.append(Note(keyword, f"#{step(pointer, keyword)}", text))
            if len(out) > MAX_NOTES:
                return (*out[: MAX_NOTES - 1], Note("", "#", "there are more notes than are listed"))
    return tuple(out)


def _text(keyword: str, value: object) -> str:
    if keyword not in KNOWN and keyword not in ELDERS:
        return "unknown, so it is an annotation and restricts nothing"
    if keyword == "format" and value not in FORMATS:
        return f"the format {shown(value)} is unknown, so it is an annotation and restricts nothing"
    return ""
