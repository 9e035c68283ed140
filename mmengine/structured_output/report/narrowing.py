"""Writes notes on values that a schema allows, but that answers cannot have because of a format's pattern or
the bounds.
"""

from collections.abc import Iterator

from mmengine.structured_output.json_pointer import join_pointer
from mmengine.structured_output.json_schema.emission.bounds import MAX_PLACES, Bounds
from mmengine.structured_output.json_schema.reading.document import Document
from mmengine.structured_output.json_schema.vocabulary.notes import MAX_NOTES, Note

_CLOCK = "no leap seconds, and at most six digits of a second"
_ASCII = "only ASCII characters, and "
_URI, _HOSTNAME = "no IPvFuture", "at most three labels, none internationalised"
_EMAIL = "no quoted local part, and at most three parts before and after the @"
FORMATS = {
    "time": _CLOCK,
    "date-time": _CLOCK,
    "duration": "at most nine digits for each unit, and no fractions",
    "hostname": _HOSTNAME,
    "idn-hostname": _HOSTNAME,
    "email": _EMAIL,
    "idn-email": _ASCII + _EMAIL,
    "ipv6": "no scope",
    "uri": _URI,
    "uri-reference": _URI,
    "iri": _ASCII + _URI,
    "iri-reference": _ASCII + _URI,
    "uri-template": "no private-use characters",
}


def format_notes(document: Document) -> tuple[Note, ...]:
    """Return notes on formats with patterns that allow less than the RFC."""
    return _limited(
        Note(
            "format", f"#{join_pointer(node.pointer, 'format')}", f"{node.schema['format']}: {FORMATS[name]}"
        )
        for node in document.nodes
        if isinstance(node.schema, dict) and (name := str(node.schema.get("format"))) in FORMATS
    )


def bound_notes(document: Document, bounds: Bounds) -> tuple[Note, ...]:
    """Return notes on values that only the bounds exclude.

    The notes on key order are not included, because normalization writes them.
    """
    found: list[Note] = []
    if bounds.whitespace:
        found.append(Note("", "#", f"at most {bounds.whitespace} characters of white space in a row"))
    return _limited([*found, *_bounds(document, bounds)])


def _bounds(document: Document, bounds: Bounds) -> Iterator[Note]:
    for node in document.nodes:
        schema = node.schema
        if not isinstance(schema, dict) or "enum" in schema or "const" in schema:
            continue
        kinds = schema.get("type", ())
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if "string" in kinds and bounds.string and not {"maxLength", "format"} & schema.keys():
            yield Note("type", f"#{node.pointer}", f"strings have at most {bounds.string:,} characters")
        if "number" in kinds and (bounds.decimals or bounds.digits):
            places = bounds.decimals or MAX_PLACES
            text = f"numbers have at most {places} decimal places, and no exponent"
            yield Note("type", f"#{node.pointer}", text)
        if "integer" in kinds and bounds.digits and not {"minimum", "maximum"} <= schema.keys():
            yield Note("type", f"#{node.pointer}", f"integers have at most {bounds.digits} digits")
        if "object" in kinds and bounds.key and schema.get("additionalProperties") is not False:
            text = f"unnamed keys have at most {bounds.key} characters"
            yield Note("type", f"#{node.pointer}", text)


def _limited(notes: Iterator[Note] | list[Note]) -> tuple[Note, ...]:
    found: list[Note] = []
    for note in notes:
        if len(found) == MAX_NOTES:
            return (*found, Note("", "#", "more notes were omitted"))
        found.append(note)
    return tuple(found)
