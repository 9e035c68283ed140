"""Reads the response format "structural_tag": free text with tags. A tag contains JSON that matches the tag's
schema.

    text … <function=get_weather>{"city": "Oslo"}</function> … text
           ╰─trigger─╯          │                │
           ╰────────begin───────╯╰────schema────╯╰──end──╯

A trigger always begins a tag, so free text contains no trigger. No trigger may contain another trigger, and
no tag's `begin` may start with another tag's `begin`.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from mmengine.errors import FIELD, FieldPath, InvalidRequest, shown
from mmengine.structured_output.json_schema.normalization import MAX_OUTPUT, Bounds
from mmengine.structured_output.json_schema.vocabulary.refusal import SchemaRefused
from mmengine.structured_output.request.fields import (
    bounds_of,
    check_flag,
    check_mapping,
    check_string,
    normalize_cached,
    refuse_unknown_fields,
)

MAX_STRUCTURES = 128
MAX_TRIGGERS = 32
MAX_TAG_CHARS = 1_000  # Maximum length of a begin, an end or a trigger.
_FIELDS = ("type", "structures", "triggers", "at_least_one", "stop_after_first", "bounds")
_STRUCTURE_FIELDS = ("begin", "schema", "end")
_IN_NUMBERS = "0123456789.eE+-"
_ENCLOSED = ("object", "array", "string")


class Structure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tag, whose `schema` is normalized."""

    begin: str
    schema: msgspec.Raw
    end: str


class StructuralTag(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    structures: tuple[Structure, ...]
    triggers: tuple[str, ...]
    at_least_one: bool = False  # Whether at least one tag is required. Text may come before it.
    stop_after_first: bool = False  # Whether the answer ends with its first tag.


def structural_tag(where: FieldPath, given: Any) -> str:
    """Return a structural tag as a GrammarRequest's source (see spec.py).

    `given` is {"structures": [{"begin", "schema", "end"}, …], "triggers": […]} with optional "at_least_one",
    "stop_after_first" and "bounds". Raises InvalidRequest with the field and, for a schema, the keyword and
    its JSON pointer.
    """
    refuse_unknown_fields(where, check_mapping(where, given), _FIELDS)
    if given.get("type", "structural_tag") != "structural_tag":
        raise InvalidRequest(
            f"{FIELD} must be structural_tag, not {shown(given['type'])}", path=where / "type"
        )
    triggers = _list(where / "triggers", given.get("triggers"), MAX_TRIGGERS)
    triggers = [_tag(where / "triggers" / n, trigger) for n, trigger in enumerate(triggers)]
    structures = _list(where / "structures", given.get("structures"), MAX_STRUCTURES)
    begins = [_begin(where / "structures" / n, each) for n, each in enumerate(structures)]
    _check_triggers(where, triggers, begins)
    _check_begins(where, begins)
    bounds = bounds_of(where / "bounds", given.get("bounds"))
    made, size = [], 0
    for n, (begin, each) in enumerate(zip(begins, structures, strict=True)):
        made.append(_structure(where / "structures" / n, begin, each, bounds))
        size += len(bytes(made[-1].schema))
        if size > MAX_OUTPUT:
            raise InvalidRequest(
                f"{FIELD}: their schemas have more than {MAX_OUTPUT:,} bytes", path=where / "structures"
            )
    tag = StructuralTag(
        tuple(made),
        tuple(triggers),
        at_least_one=check_flag(where / "at_least_one", given.get("at_least_one")),
        stop_after_first=check_flag(where / "stop_after_first", given.get("stop_after_first")),
    )
    return msgspec.json.encode(tag).decode()


def _structure(where: FieldPath, begin: str, given: Mapping[str, Any], bounds: Bounds) -> Structure:
    if "schema" not in given:
        raise InvalidRequest(f"{FIELD} must contain a schema", path=where)
    end = check_string(where / "end", given.get("end"), MAX_TAG_CHARS)
    try:
        schema = normalize_cached(given["schema"], bounds).text
    except SchemaRefused as error:
        raise InvalidRequest(f"{FIELD}: {error}", path=where) from None
    if (not end or end[0] in _IN_NUMBERS) and not _is_enclosed(msgspec.json.decode(schema)):
        raise InvalidRequest(
            f"{FIELD} does not show where a number ends; begin it with another "
            f"character, or give the schema the type {', '.join(_ENCLOSED)}",
            path=where / "end",
        )
    return Structure(begin, msgspec.Raw(schema.encode()), end)


def _is_enclosed(schema: Mapping[str, Any]) -> bool:
    """Return whether all values of a normalized schema end with a bracket or a quotation mark. Such an end
    shows that the value is complete.
    """
    return schema.get("type") in _ENCLOSED or ("anyOf" in schema and all(map(_is_enclosed, schema["anyOf"])))


def _check_triggers(where: FieldPath, triggers: list[str], begins: list[str]) -> None:
    for n, trigger in enumerate(triggers):
        for m, other in enumerate(triggers):
            if m != n and trigger in other:
                raise InvalidRequest(
                    f"{FIELD}, {shown(trigger)}, is in triggers[{m}], {shown(other)}, so that "
                    "one could never begin a tag; keep one of them",
                    path=where / "triggers" / n,
                )
        if not any(begin.startswith(trigger) for begin in begins):
            raise InvalidRequest(
                f"{FIELD}, {shown(trigger)}, starts no structure; leave it out", path=where / "triggers" / n
            )
    for n, begin in enumerate(begins):
        if not begin.startswith(tuple(triggers)):
            raise InvalidRequest(
                f"{FIELD}, {shown(begin)}, starts with none of the triggers",
                path=where / "structures" / n / "begin",
            )


def _check_begins(where: FieldPath, begins: list[str]) -> None:
    order = sorted(range(len(begins)), key=lambda n: begins[n])
    # In sorted order, a text and the texts that begin with it are neighbours.
    for n, m in zip(order, order[1:]):
        if begins[m].startswith(begins[n]):
            raise InvalidRequest(
                f"{FIELD}, {shown(begins[n])}, also begins structures[{m}], so an answer "
                "could mean either structure; merge them into one structure, with anyOf in its schema",
                path=where / "structures" / n / "begin",
            )


def _begin(where: FieldPath, given: Any) -> str:
    refuse_unknown_fields(where, check_mapping(where, given), _STRUCTURE_FIELDS)
    return _tag(where / "begin", given.get("begin"))


def _tag(where: FieldPath, value: Any) -> str:
    if value == "":
        raise InvalidRequest(f"{FIELD} must not be empty", path=where)
    return check_string(where, value, MAX_TAG_CHARS)


def _list(where: FieldPath, value: Any, most: int) -> list[Any]:
    if not isinstance(value, (list, tuple)) or not 1 <= len(value) <= most:
        raise InvalidRequest(f"{FIELD} must be a list of 1 to {most}", path=where)
    return list(value)
