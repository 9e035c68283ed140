"""Writes notes on schema parts that mmengine enforces but OpenAI's `strict: true` refuses."""

from collections import deque

from mmengine.structured_output.json_pointer import join_pointer
from mmengine.structured_output.json_schema.reading.translation import subschemas
from mmengine.structured_output.json_schema.vocabulary.notes import Note

# OpenAI's limits for a whole schema:
MAX_PROPERTIES = 5_000  # Maximum number of properties in all objects together.
MAX_LEVELS = 10  # Maximum nesting depth of objects and arrays.
MAX_ENUM_VALUES = 1_000  # Maximum number of values in all enums together.
# Maximum number of characters in all names (of properties and definitions) and all values (of enum and const)
# together.
MAX_CHARS = 120_000
MAX_STRICT_NOTES = 100
UNSUPPORTED = frozenset(
    [
        "allOf",
        "oneOf",
        "not",
        "if",
        "then",
        "else",
        "dependentRequired",
        "dependentSchemas",
        "patternProperties",
    ]
    + ["propertyNames", "unevaluatedProperties", "unevaluatedItems", "contains", "minContains", "maxContains"]
    + ["uniqueItems", "minProperties", "maxProperties", "prefixItems", "$dynamicRef"]
)
_WHY = "supported here, but OpenAI's strict mode refuses it: "


def strict_notes(schema: object) -> tuple[Note, ...]:
    """Return at most MAX_STRICT_NOTES notes on constructs that strict mode refuses.

    `schema` must have passed normalization.
    """
    notes: list[Note] = []
    if not isinstance(schema, dict):
        return (Note("", "#", _WHY + "the root must be an object with properties"),)
    if schema.get("type") != "object" or "anyOf" in schema:
        notes.append(Note("type", "#", _WHY + "the root must have the type object and no anyOf"))
    counts = {"properties": 0, "values": 0, "chars": 0, "levels": 0}
    pending = deque([(schema, "", 0)])
    while pending:
        each, pointer, level = pending.popleft()
        notes += _object_notes(each, pointer)
        _count(each, level, counts)
        for names, child in subschemas(each):
            deeper = level + (names[0] in ("properties", "items", "additionalProperties"))
            if isinstance(child, dict):
                pending.append((child, join_pointer(pointer, *names), deeper))
    notes += _limit_notes(counts)
    if len(notes) > MAX_STRICT_NOTES:
        notes[MAX_STRICT_NOTES - 1 :] = [Note("", "#", "more notes were omitted")]
    return tuple(notes)


def _object_notes(schema: dict, pointer: str) -> list[Note]:
    notes = [
        Note(keyword, f"#{join_pointer(pointer, keyword)}", f"{_WHY}{keyword} is not supported")
        for keyword in schema
        if keyword in UNSUPPORTED
    ]
    properties = schema.get("properties")
    if schema.get("type") != "object" and not isinstance(properties, dict):
        return notes
    names = properties if isinstance(properties, dict) else {}
    required = schema.get("required", [])
    missing = [name for name in names if name not in required]
    if missing:
        said = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        notes.append(
            Note("required", f"#{pointer}", f"{_WHY}all properties must be required; these are not: {said}")
        )
    if schema.get("additionalProperties") is not False:
        why = "additionalProperties must be false"
        notes.append(Note("additionalProperties", f"#{pointer}", _WHY + why))
    return notes


def _count(schema: dict, level: int, counts: dict[str, int]) -> None:
    values = [*_as_list(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
    names = [name for keyword in ("properties", "$defs", "definitions") for name in schema.get(keyword) or ()]
    counts["properties"] += len(schema.get("properties") or ())
    counts["values"] += len(_as_list(schema.get("enum")))
    counts["chars"] += sum(len(each) for each in (*values, *names) if isinstance(each, str))
    counts["levels"] = max(counts["levels"], level)


def _as_list(value: object) -> list:
    return value if isinstance(value, list) else []


def _limit_notes(counts: dict[str, int]) -> list[Note]:
    limits = {
        "properties": (MAX_PROPERTIES, "properties"),
        "values": (MAX_ENUM_VALUES, "values of enum"),
        "chars": (MAX_CHARS, "characters of names and values"),
        "levels": (MAX_LEVELS, "levels"),
    }
    return [
        Note("", "#", f"{_WHY}{counts[name]:,} {what}; the limit is {most:,}")
        for name, (most, what) in limits.items()
        if counts[name] > most
    ]
