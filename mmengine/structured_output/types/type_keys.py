"""Writes JSON schemas for dicts with typed keys."""

from collections.abc import Mapping

from mmengine.errors import InvalidRequest
from mmengine.structured_output.json_schema.vocabulary.formats import FORMATS
from mmengine.structured_output.types import type_patterns as patterns
from mmengine.structured_output.types.type_patterns import Schema

_NUMBERS = {"integer": patterns.INTEGER_KEY, "number": patterns.NUMBER_KEY}
_ANNOTATIONS = frozenset({"title", "description", "examples", "default"})


def dict_schema(keys: Schema, values: Schema, sizes: Mapping[str, int]) -> Schema:
    """Return a schema for objects whose keys match `keys` and whose values match `values`.

    `keys`: the key type's schema, such as {"type": "integer"} for int. `sizes`: minProperties and
    maxProperties. Raises InvalidRequest for unsupported key types.
    """
    found: Schema = {"type": "object", **sizes}
    said = {keyword: value for keyword, value in keys.items() if keyword not in _ANNOTATIONS}
    kind, others = said.get("type"), said.keys() - {"type"}
    names = said.get("enum", [said["const"]] if "const" in said else None)
    if names is not None and all(isinstance(name, str) for name in names):
        return {**found, "properties": dict.fromkeys(names, values), "additionalProperties": False}
    if not said or (kind == "string" and not others):
        return {**found, "additionalProperties": values}
    pattern = _NUMBERS.get(kind) if isinstance(kind, str) and not others else None
    if kind == "string" and others == {"pattern"}:
        pattern = said["pattern"]
    if kind == "string" and others == {"format"} and said["format"] in FORMATS:
        pattern = f"^(?:{FORMATS[said['format']]})$"
    if pattern is not None:
        return {**found, "patternProperties": {pattern: values}, "additionalProperties": False}
    if kind == "string" or "$ref" in said:
        return {**found, "propertyNames": keys, "additionalProperties": values}
    raise InvalidRequest(
        "the keys of a dict can be str, int, float, a Literal or an Enum of strings, not these"
    )
