"""Translates a schema object from any draft to draft 2020-12, and drops annotations.

Constructs from older drafts are rewritten with the same meaning: for example `items` with an array,
`dependencies`, a boolean `exclusiveMinimum`, and a `$ref` whose siblings are ignored. Without `$schema`, the
draft is 2020-12, but constructs that only older drafts define keep their meaning if all older drafts agree on
the meaning. `translate` does not translate subschemas.
"""

from collections.abc import Callable

import msgspec

from mmengine.structured_output.json_pointer import join_pointer
from mmengine.structured_output.json_schema.vocabulary.dialects import (
    ANNOTATION_KEYWORDS,
    KNOWN_IN,
    NAMES,
    SIBLINGS_IGNORED,
    UNSPECIFIED,
    words,
)
from mmengine.structured_output.json_schema.vocabulary.formats import FORMATS
from mmengine.structured_output.json_schema.vocabulary.keywords import (
    STANDARD_FORMATS,
    SUBSCHEMA,
    SUBSCHEMA_LIST,
    SUBSCHEMA_MAP,
    TYPE_NAMES,
    show_value,
)
from mmengine.structured_output.json_schema.vocabulary.refusal import refuse

# Keywords whose subschemas apply only where a reference names them.
_HOLDING = ("$defs", "definitions")
_NAMING = words("$schema $id id $anchor $dynamicAnchor $recursiveAnchor")
_BESIDE_TYPE = {
    draft: {"type", *(known & ANNOTATION_KEYWORDS - _NAMING - {*_HOLDING, "contentSchema"})}
    for draft, known in KNOWN_IN.items()
}
# Format names in draft-03 -> their present names.
_OLD_FORMATS = {"ip-address": "ipv4", "host-name": "hostname"}
ENDLESS = 2**31  # A count that no answer can reach.

Names = tuple[str | int, ...]


class TranslatedSchema(msgspec.Struct):
    """A schema object in draft 2020-12 keywords.

    `schema` has the keywords that restrict values. `origins` maps a subschema's path in `schema` to its path
    in the input, if the paths differ. `unused` has subschemas that only references can use. `unknown` lists
    keywords that the draft does not define. `remarks` has (keyword, note) pairs.
    """

    schema: dict[str, object] = {}
    origins: dict[Names, Names] = {}
    unused: list[tuple[Names, object]] = []
    unknown: list[str] = []
    remarks: list[tuple[str, str]] = []


def has_only_type(schema: dict, draft: int) -> bool:
    """Return whether the schema has only a type and annotations, without subschemas and identifiers."""
    kind = schema.get("type")
    return isinstance(kind, str) and kind in TYPE_NAMES and _BESIDE_TYPE[draft].issuperset(schema)


def translate(schema: dict, draft: int, pointer: str) -> TranslatedSchema:
    """Translate a schema object. `pointer` is the object's JSON pointer, for error messages."""
    out = TranslatedSchema()
    for keyword, value in schema.items():
        if keyword not in KNOWN_IN[draft]:
            out.unknown.append(keyword)
        elif keyword in _RULES:
            _RULES[keyword](out, schema, draft, pointer)
        elif keyword not in ANNOTATION_KEYWORDS:
            out.schema[keyword] = value
        else:
            _collect_unused(out, keyword, value)
    if draft in SIBLINGS_IGNORED and "$ref" in schema:
        _drop_ref_siblings(out)
    return out


def _collect_unused(out: TranslatedSchema, keyword: str, value: object) -> None:
    if keyword in _HOLDING and isinstance(value, dict):
        out.unused += [((keyword, name), child) for name, child in value.items()]
    elif keyword == "contentSchema":
        out.unused.append(((keyword,), value))


def _drop_ref_siblings(out: TranslatedSchema) -> None:
    """Drop all keywords beside a $ref. References can still use the dropped subschemas."""
    for names, child in subschemas(out.schema):
        out.unused.append((out.origins.get(names, names), child))
    others = ", ".join(keyword for keyword in out.schema if keyword != "$ref")
    if others:
        out.remarks.append(("$ref", f"this draft ignores the keywords beside it ({others})"))
    out.schema = {"$ref": out.schema["$ref"]}
    out.origins = {}


def subschemas(schema: dict[str, object]) -> list[tuple[Names, object]]:
    """Return (path, subschema) for each direct subschema in a translated schema object."""
    out: list[tuple[Names, object]] = []
    for keyword, value in schema.items():
        if keyword in SUBSCHEMA:
            out.append(((keyword,), value))
        elif keyword in SUBSCHEMA_LIST and isinstance(value, list):
            out += [((keyword, at), child) for at, child in enumerate(value)]
        elif keyword in SUBSCHEMA_MAP and isinstance(value, dict):
            out += [((keyword, name), child) for name, child in value.items()]
    return out


def _items(out: TranslatedSchema, schema: dict, draft: int, pointer: str) -> None:
    items = schema["items"]
    if not isinstance(items, list) or draft == 2020:
        out.schema["items"] = items
        return
    if "prefixItems" in schema:
        refuse(
            "items", join_pointer(pointer, "items"), "must be a single schema beside prefixItems, not a list"
        )
    if items:
        out.schema["prefixItems"] = items
        out.origins |= {("prefixItems", at): ("items", at) for at in range(len(items))}
    if "additionalItems" in schema:
        out.schema["items"] = schema["additionalItems"]
        out.origins["items",] = ("additionalItems",)


def _additional_items(out: TranslatedSchema, schema: dict, draft: int, pointer: str) -> None:
    # If `items` is a list, `_items` has translated `additionalItems`.
    if not isinstance(schema.get("items"), list):
        out.unused.append((("additionalItems",), schema["additionalItems"]))


def _dependencies(out: TranslatedSchema, schema: dict, draft: int, pointer: str) -> None:
    pointer = join_pointer(pointer, "dependencies")
    if not isinstance(schema["dependencies"], dict):
        refuse("dependencies", pointer, "must be an object of schemas and of lists of names")
    beside = (schema.get("dependentRequired"), schema.get("dependentSchemas"))
    names: dict[str, object] = {}
    schemas: dict[str, object] = {}
    for name, value in schema["dependencies"].items():
        if any(name in others for others in beside if isinstance(others, dict)):
            refuse(
                "dependencies",
                join_pointer(pointer, name),
                "dependentRequired or dependentSchemas defines the same name",
            )
        if isinstance(value, list) or draft == 3 and isinstance(value, str):
            names[name] = _unique(value) if isinstance(value, list) else [value]
        else:
            schemas[name] = value
            out.origins["dependentSchemas", name] = ("dependencies", name)
    for keyword, found in (("dependentRequired", names), ("dependentSchemas", schemas)):
        if found:
            _add_dependent(out, keyword, found)


def _dependent(keyword: str) -> Callable[[TranslatedSchema, dict, int, str], None]:
    def rule(out: TranslatedSchema, schema: dict, draft: int, pointer: str) -> None:
        _add_dependent(out, keyword, schema[keyword])

    return rule


def _add_dependent(out: TranslatedSchema, keyword: str, value: object) -> None:
    before = out.schema.get(keyword)
    if isinstance(before, dict) and isinstance(value, dict):
        value = {**before, **value}
    out.schema[keyword] = value


def _limit(inclusive: str, exclusive: str) -> Callable[[TranslatedSchema, dict, int, str], None]:
    """Return the translation rule for a limit.

    In old drafts, the keyword `exclusive` is a boolean that makes the limit exclusive.
    """

    def rule(out: TranslatedSchema, schema: dict, draft: int, pointer: str) -> None:
        flag = schema.get(exclusive)
        older = draft in (UNSPECIFIED, 3, 4)
        if draft in (3, 4) and inclusive in schema and flag is not None and not isinstance(flag, bool):
            refuse(exclusive, join_pointer(pointer, exclusive), f"must be true or false in {NAMES[draft]}")
        if inclusive in schema:
            out.schema[exclusive if older and flag is True else inclusive] = schema[inclusive]
        if flag is not None and not (older and isinstance(flag, bool)):
            out.schema[exclusive] = flag

    return rule


def _required(out: TranslatedSchema, schema: dict, draft: int, pointer: str) -> None:
    names = schema["required"]
    if draft == 3 and isinstance(names, bool):
        return  # In draft 3, a boolean `required` restricts the object that has this property.
    unique = _unique(names)
    if unique != names:
        out.remarks.append(("required", "lists a property twice"))
    out.schema["required"] = unique


def _unique(names: object) -> object:
    """Return the names without duplicates. A value that is not a list of names is returned unchanged."""
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        return list(dict.fromkeys(names))
    return names


def _type(out: TranslatedSchema, schema: dict, draft: int, pointer: str) -> None:
    types = schema["type"]
    names = types if isinstance(types, list) else [types]
    if draft == 3 and "any" in names:
        return
    if schema.get("nullable") is True and draft == UNSPECIFIED and "null" not in names:
        types = [*names, "null"]
        out.remarks.append(("nullable", "treated as in OpenAPI 3.0: null is allowed too"))
    out.schema["type"] = types


def _nullable(out: TranslatedSchema, schema: dict, draft: int, pointer: str) -> None:
    if schema["nullable"] is True and "type" not in schema:
        out.remarks.append(("nullable", "has no effect without a type, as in OpenAPI 3.0"))


def _properties(out: TranslatedSchema, schema: dict, draft: int, pointer: str) -> None:
    out.schema["properties"] = properties = schema["properties"]
    if draft == 3 and isinstance(properties, dict):
        needed = [name for name, one in properties.items() if isinstance(one, dict) and one.get("required")]
        if needed:
            out.schema["required"] = needed


def _extends(out: TranslatedSchema, schema: dict, draft: int, pointer: str) -> None:
    value = schema["extends"]
    out.schema["allOf"] = value if isinstance(value, list) else [value]
    if not isinstance(value, list):
        out.origins["allOf", 0] = ("extends",)
    else:
        out.origins |= {("allOf", at): ("extends", at) for at in range(len(value))}


def _disallow(out: TranslatedSchema, schema: dict, draft: int, pointer: str) -> None:
    out.schema["not"] = {"type": schema["disallow"]}
    out.origins["not",] = ("disallow",)


def _recursive(out: TranslatedSchema, schema: dict, draft: int, pointer: str) -> None:
    if schema["$recursiveRef"] != "#":
        refuse("$recursiveRef", join_pointer(pointer, "$recursiveRef"), 'must be "#"')
    out.schema["$dynamicRef"] = "#"


def _count(keyword: str) -> Callable[[TranslatedSchema, dict, int, str], None]:
    def rule(out: TranslatedSchema, schema: dict, draft: int, pointer: str) -> None:
        value = schema[keyword]
        if isinstance(value, bool) or not isinstance(value, int | float) or value < ENDLESS:
            out.schema[keyword] = value

    return rule


def _format(out: TranslatedSchema, schema: dict, draft: int, pointer: str) -> None:
    name = schema["format"]
    if draft == 3 and isinstance(name, str):
        name = _OLD_FORMATS.get(name, name)
    known = (
        not isinstance(name, str)
        or name in FORMATS
        or name in STANDARD_FORMATS
        or draft == 3
        and name == "color"
    )
    if not known:
        out.remarks.append(("format", f"the format {show_value(name)} is unknown and restricts nothing"))
    else:
        out.schema["format"] = name


def _divisible(out: TranslatedSchema, schema: dict, draft: int, pointer: str) -> None:
    out.schema["multipleOf"] = schema["divisibleBy"]


_RULES: dict[str, Callable[[TranslatedSchema, dict, int, str], None]] = {
    "items": _items,
    "additionalItems": _additional_items,
    "dependencies": _dependencies,
    "dependentRequired": _dependent("dependentRequired"),
    "dependentSchemas": _dependent("dependentSchemas"),
    "minimum": _limit("minimum", "exclusiveMinimum"),
    "exclusiveMinimum": _limit("minimum", "exclusiveMinimum"),
    "maximum": _limit("maximum", "exclusiveMaximum"),
    "exclusiveMaximum": _limit("maximum", "exclusiveMaximum"),
    "required": _required,
    "type": _type,
    "nullable": _nullable,
    "properties": _properties,
    "extends": _extends,
    "disallow": _disallow,
    "divisibleBy": _divisible,
    "$recursiveRef": _recursive,
    "format": _format,
    **{keyword: _count(keyword) for keyword in ("maxLength", "maxItems", "maxProperties")},
}
