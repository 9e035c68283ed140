"""Writes JSON Schemas for types that pydantic supports.

Every answer that satisfies a schema from this module passes pydantic's validation, unless the type's own code
(a validator) rejects the answer. pydantic's own schemas allow values that validation rejects: a Decimal may
be any string, and a URL may have any scheme. A type is refused if no schema can express its rule, for example
that a file exists. This module requires pydantic, an optional dependency.
"""

from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from typing import Any

from pydantic import ByteSize, TypeAdapter
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, PydanticInvalidForJsonSchema
from pydantic_core import core_schema

from mmengine.errors import InvalidRequest
from mmengine.structured_output.types import type_patterns as patterns
from mmengine.structured_output.types.type_keys import dict_schema

# Marks schemas for bytes, which otherwise look like schemas for base64 text.
_OF_BYTES = {"contentMediaType": "application/octet-stream"}
_UNHASHABLE = frozenset({"list", "dict", "set", "typed-dict", "deque"})
MAX_DECIMAL_DIGITS = 15  # A float represents this many decimal digits exactly.


def adapter_of(what: Any) -> TypeAdapter[Any]:
    """Return a type's TypeAdapter, or the given adapter. Raises InvalidRequest for an unknown type."""
    if isinstance(what, TypeAdapter):
        return what
    try:
        return TypeAdapter(what)
    except (PydanticUserError, TypeError, ValueError, ImportError, NameError, AttributeError) as error:
        raise InvalidRequest(f"{_name(what)} has no JSON Schema: {_first_line(error)}") from None


def schema_of(what: object) -> JsonSchemaValue:
    """Return the JSON Schema for values that pydantic can validate as this type."""
    try:
        return adapter_of(what).json_schema(schema_generator=_Narrow, mode="validation")
    except (PydanticUserError, PydanticInvalidForJsonSchema, RecursionError) as error:
        raise InvalidRequest(f"{_name(what)} has no JSON Schema: {_first_line(error)}") from None


def _name(what: object) -> str:
    return getattr(what, "__name__", repr(what))


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _string(pattern: str, **others: object) -> JsonSchemaValue:
    return {"type": "string", "pattern": pattern, **others}


class _Narrow(GenerateJsonSchema):
    """Generates stricter schemas than pydantic.

    Each method named after a core type overrides pydantic's method for this type.
    """

    def emit_warning(self, kind: str, detail: str) -> None:
        """Ignore warnings, for example about a default that is not JSON. Warnings do not affect answers."""

    def _refuse(self, what: str) -> JsonSchemaValue:
        raise InvalidRequest(
            f"{what} is checked by pydantic, and no schema can express it; use a simpler type"
        )

    def decimal_schema(self, schema: core_schema.DecimalSchema) -> JsonSchemaValue:
        """Return a schema for a JSON number. pydantic's schema would also allow a string."""
        given = ("ge", "minimum"), ("le", "maximum"), ("gt", "exclusiveMinimum"), ("lt", "exclusiveMaximum")
        found: JsonSchemaValue = {"type": "number"}
        limits = dict(schema)
        for name, keyword in (*given, ("multiple_of", "multipleOf")):
            if limits.get(name) is not None:
                found[keyword] = float(str(limits[name]))
        digits, places = schema.get("max_digits"), schema.get("decimal_places")
        if digits is None and places is None:
            return found
        digits = min(MAX_DECIMAL_DIGITS, MAX_DECIMAL_DIGITS if digits is None else digits)
        cuts = range(digits + 1) if places is None else [min(places, digits)]
        return {"allOf": [found, {"anyOf": [_with_digits(digits - cut, cut) for cut in cuts]}]}

    def fraction_schema(self, schema: core_schema.FractionSchema) -> JsonSchemaValue:
        if any(schema.get(name) is not None for name in ("ge", "le", "gt", "lt", "multiple_of")):
            return self._refuse("the range of a Fraction")
        return {"type": "integer"}

    def complex_schema(self, schema: core_schema.ComplexSchema) -> JsonSchemaValue:
        return self._refuse("a complex number")

    def literal_schema(self, schema: core_schema.LiteralSchema) -> JsonSchemaValue:
        self._check_values(schema["expected"])
        return super().literal_schema(schema)

    def enum_schema(self, schema: core_schema.EnumSchema) -> JsonSchemaValue:
        self._check_values([each.value for each in schema["members"]])
        return super().enum_schema(schema)

    def _check_values(self, values: list[object]) -> None:
        """Refuse enum values that are not JSON scalars, because no parsed JSON value would equal them."""
        if not all(each is None or isinstance(each, str | int | float) for each in values):
            self._refuse("a Literal or an Enum with values other than strings, numbers, booleans and None")

    def is_subclass_schema(self, schema: core_schema.IsSubclassSchema) -> JsonSchemaValue:
        return self._refuse("a class")

    def model_field_schema(self, schema: core_schema.ModelField) -> JsonSchemaValue:
        self._check_alias(schema.get("validation_alias"))
        return super().model_field_schema(schema)

    def dataclass_field_schema(self, schema: core_schema.DataclassField) -> JsonSchemaValue:
        self._check_alias(schema.get("validation_alias"))
        return super().dataclass_field_schema(schema)

    def typed_dict_field_schema(self, schema: core_schema.TypedDictField) -> JsonSchemaValue:
        self._check_alias(schema.get("validation_alias"))
        return super().typed_dict_field_schema(schema)

    def _check_alias(self, alias: object) -> None:
        """Refuse a validation alias that is a path into nested values, which no schema can express."""
        if isinstance(alias, list):
            paths = [each if isinstance(each, list) else alias for each in alias]
            if not any(len(path) == 1 and isinstance(path[0], str) for path in paths):
                self._refuse("an AliasPath into other values")

    def call_schema(self, schema: core_schema.CallSchema) -> JsonSchemaValue:
        """Refuse a function as a type: validation would call the function."""
        return self._refuse("a function")

    def json_schema(self, schema: core_schema.JsonSchema) -> JsonSchemaValue:
        return self._refuse("JSON within a string")

    def str_schema(self, schema: core_schema.StringSchema) -> JsonSchemaValue:
        found = super().str_schema(schema)
        if found.get("pattern") == ByteSize.byte_string_pattern:
            found["pattern"] = patterns.BYTE_SIZE
        if schema.get("strip_whitespace") and ("minLength" in found or "pattern" in found):
            found = {"allOf": [found, _string("^[!-~](?:.*[!-~])?$")]}
        if schema.get("ascii_only"):
            found = {"allOf": [found, _string(patterns.ASCII)]}
        return patterns.ascii_where_classes_differ(found)

    def bytes_schema(self, schema: core_schema.BytesSchema) -> JsonSchemaValue:
        """Return a schema for bytes.

        The type limits the number of bytes, but a schema can only limit the number of characters. With UTF-8,
        a limit therefore restricts the text to ASCII. With base64 or hex, a limit is refused.
        """
        given = {"minLength": schema.get("min_length"), "maxLength": schema.get("max_length")}
        lengths = {keyword: length for keyword, length in given.items() if length is not None}
        encoding = self._config.val_json_bytes
        if encoding == "utf8":
            return (
                _string(patterns.ASCII, **lengths, **_OF_BYTES)
                if lengths
                else {"type": "string", **_OF_BYTES}
            )
        if lengths:
            return self._refuse(f"the length of bytes in {encoding}")
        return _string(patterns.HEX if encoding == "hex" else patterns.BASE64URL)

    def date_schema(self, schema: core_schema.DateSchema) -> JsonSchemaValue:
        found: JsonSchemaValue = {"type": "string", "format": "date"}
        first, last = schema.get("ge", date.min), schema.get("le", date.max)
        a_day, today = timedelta(days=1), datetime.now(UTC).date()
        try:
            first = max(first, schema["gt"] + a_day) if "gt" in schema else first
            last = min(last, schema["lt"] - a_day) if "lt" in schema else last
            # The extra days allow for other time zones and for the time until validation.
            first = max(first, today + 3 * a_day) if schema.get("now_op") == "future" else first
            last = min(last, today - 2 * a_day) if schema.get("now_op") == "past" else last
        except OverflowError:
            return self._refuse("a date outside the supported range")
        if first > last:
            return self._refuse(f"a date from {first} to {last}")
        return (
            found
            if (first, last) == (date.min, date.max)
            else {**found, "pattern": patterns.dates(first, last)}
        )

    def datetime_schema(self, schema: core_schema.DatetimeSchema) -> JsonSchemaValue:
        if any(name in schema for name in ("ge", "le", "gt", "lt")):
            return self._refuse("the range of a datetime")
        found: JsonSchemaValue = {"type": "string", "format": "date-time"}
        constraint, now_op = schema.get("tz_constraint"), schema.get("now_op")
        if isinstance(constraint, int) or (constraint == "naive" and now_op):
            return self._refuse("the time zone of a datetime")
        if constraint == "naive":
            return _string(patterns.NAIVE_DATETIME)
        if now_op is not None:
            days = self.date_schema(core_schema.date_schema(now_op=now_op))["pattern"]
            found["pattern"] = f"{days.removesuffix('$')}[Tt]"
        return found

    def time_schema(self, schema: core_schema.TimeSchema) -> JsonSchemaValue:
        if any(name in schema for name in ("ge", "le", "gt", "lt")):
            return self._refuse("the range of a time")
        if schema.get("tz_constraint") == "naive":
            return _string(patterns.NAIVE_TIME)
        if isinstance(schema.get("tz_constraint"), int):
            return self._refuse("the time zone of a time")
        return {"type": "string", "format": "time"}

    def timedelta_schema(self, schema: core_schema.TimedeltaSchema) -> JsonSchemaValue:
        if any(name in schema for name in ("ge", "le", "gt", "lt")):
            return self._refuse("the range of a timedelta")
        return _string(patterns.SHORT_DURATION, format="duration")

    def url_schema(self, schema: core_schema.UrlSchema | core_schema.MultiHostUrlSchema) -> JsonSchemaValue:
        limit = schema.get("max_length", 2083)
        # Minus 1, because pydantic adds "/" to a URL without a path.
        return _string(patterns.url(schema.get("allowed_schemes")), maxLength=min(limit, 2083) - 1)

    multi_host_url_schema = url_schema

    def uuid_schema(self, schema: core_schema.UuidSchema) -> JsonSchemaValue:
        version = schema.get("version")
        return {"type": "string", "format": "uuid"} if version is None else _string(patterns.uuid(version))

    def set_schema(self, schema: core_schema.SetSchema) -> JsonSchemaValue:
        return self._hashable(schema.get("items_schema"), super().set_schema(schema))

    def frozenset_schema(self, schema: core_schema.FrozenSetSchema) -> JsonSchemaValue:
        return self._hashable(schema.get("items_schema"), super().frozenset_schema(schema))

    def _hashable(self, items: Mapping[str, object] | None, found: JsonSchemaValue) -> JsonSchemaValue:
        """Return a schema for a set, whose items must be hashable.

        Items of an unrestricted type may be strings, numbers, booleans and null.
        """
        if items is None or items["type"] == "any":
            return {**found, "items": {"type": patterns.PLAIN_TYPES}}
        self._check_items(items)
        return found

    def _check_items(self, kind: Mapping[str, object]) -> None:
        if kind["type"] in _UNHASHABLE or getattr(kind.get("cls"), "__hash__", True) is None:
            name = getattr(kind.get("cls"), "__name__", kind["type"])
            raise InvalidRequest(
                f"a set of {name} has no hash for its items; ask for a list, or freeze the model"
            )
        within = kind.get("choices", kind.get("items_schema", ()))
        for each in within if isinstance(within, list) else ():
            self._check_items(each[0] if isinstance(each, tuple) else each)

    def dict_schema(self, schema: core_schema.DictSchema) -> JsonSchemaValue:
        return self._with_keys(schema, super().dict_schema(schema))

    def frozendict_schema(self, schema: core_schema.FrozenDictSchema) -> JsonSchemaValue:
        return self._with_keys(schema, super().frozendict_schema(schema))

    def ordered_dict_schema(self, schema: core_schema.OrderedDictSchema) -> JsonSchemaValue:
        return self._with_keys(schema, super().ordered_dict_schema(schema))

    def counter_schema(self, schema: core_schema.CounterSchema) -> JsonSchemaValue:
        return self._with_keys(schema, super().counter_schema(schema))

    def _with_keys(self, schema: Any, found: JsonSchemaValue) -> JsonSchemaValue:
        sizes = {name: size for name, size in found.items() if name in ("minProperties", "maxProperties")}
        keys = self.generate_inner(schema["keys_schema"]) if "keys_schema" in schema else {}
        values = self.generate_inner(schema["values_schema"]) if "values_schema" in schema else {}
        return dict_schema(keys, values, sizes)

    def tagged_union_schema(self, schema: core_schema.TaggedUnionSchema) -> JsonSchemaValue:
        """Return a schema that requires the tag, even if the model has a default for the tag."""
        found = super().tagged_union_schema(schema)
        tag = found.get("discriminator", {}).get("propertyName")
        if tag is None:
            return self._refuse("a union's Discriminator function")
        return {"anyOf": [{"allOf": [branch, {"required": [tag]}]} for branch in found["oneOf"]]}


def _with_digits(before: int, behind: int) -> JsonSchemaValue:
    """Return a schema for numbers with a limited number of digits.

    `before` and `behind` are the maximum numbers of digits before and after the decimal point.
    """
    limits = {"exclusiveMinimum": -(10**before), "exclusiveMaximum": 10**before}
    if not behind:
        return {"type": "integer", **limits}
    return {"type": "number", "multipleOf": float(f"1e-{behind}"), **limits}
