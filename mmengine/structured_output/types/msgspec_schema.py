"""Writes JSON Schemas for types that msgspec supports (a Struct, a dataclass, a TypedDict, list[int], …).

msgspec can decode every answer that satisfies a schema from this module. msgspec's own schemas allow more,
for example any string for a datetime.

pathlib's paths are supported too; `paths` decodes them.
"""

import re
from collections.abc import Callable
from functools import singledispatchmethod
from pathlib import PurePath

from msgspec import inspect as kinds
from msgspec import to_builtins

from mmengine.errors import InvalidRequest
from mmengine.structured_output.types import type_patterns as patterns
from mmengine.structured_output.types.type_keys import dict_schema
from mmengine.structured_output.types.type_patterns import Schema

_UNHASHABLE = (kinds.ListType, kinds.SetType, kinds.DictType, kinds.TypedDictType, kinds.ByteArrayType)
_Fields = kinds.StructType | kinds.TypedDictType | kinds.DataclassType | kinds.NamedTupleType


def schema_of(what: object) -> Schema:
    """Return a type's JSON Schema.

    Raises TypeError or InvalidRequest if msgspec does not support the type.
    """
    writer = _Writer()
    schema = writer.write(kinds.type_info(what))
    return {**schema, "$defs": writer.definitions} if writer.definitions else schema


def paths(kind: type, value: object) -> object:
    """Decode a path. Used as dec_hook for types that msgspec.json.decode does not support."""
    if issubclass(kind, PurePath) and isinstance(value, str):
        return kind(value)
    raise NotImplementedError(f"{kind.__name__} cannot be decoded")


def _limits(found: Schema, kind: object, **names: str) -> Schema:
    given = {keyword: getattr(kind, name) for name, keyword in names.items()}
    return {**found, **{keyword: value for keyword, value in given.items() if value is not None}}


def _number(name: str, kind: kinds.IntType | kinds.FloatType) -> Schema:
    return _limits(
        {"type": name},
        kind,
        ge="minimum",
        gt="exclusiveMinimum",
        le="maximum",
        lt="exclusiveMaximum",
        multiple_of="multipleOf",
    )


def _check_hash(kind: kinds.Type) -> None:
    """Raise InvalidRequest if `kind` is not hashable and therefore cannot be a set's item type."""
    while isinstance(kind, kinds.Metadata):
        kind = kind.type
    for each in (*getattr(kind, "types", ()), *getattr(kind, "item_types", ())):
        _check_hash(each)
    cls = getattr(kind, "cls", None)
    if isinstance(kind, _UNHASHABLE) or getattr(cls, "__hash__", True) is None:
        name = getattr(cls, "__name__", type(kind).__name__)
        raise InvalidRequest(
            f"a set of {name} has no hash for its items; ask for a list, or freeze the class"
        )


class _Writer:
    def __init__(self) -> None:
        self.definitions: dict[str, Schema] = {}
        self._names: dict[object, str] = {}

    @singledispatchmethod
    def write(self, kind: kinds.Type) -> Schema:
        raise TypeError(f"{getattr(kind, 'cls', type(kind).__name__)} is not supported")

    @write.register
    def _(self, kind: kinds.Metadata) -> Schema:
        return {**self.write(kind.type), **(kind.extra_json_schema or {})}

    @write.register(kinds.AnyType)
    @write.register(kinds.RawType)
    def _(self, kind: kinds.Type) -> Schema:
        return {}

    @write.register
    def _(self, kind: kinds.NoneType) -> Schema:
        return {"type": "null"}

    @write.register
    def _(self, kind: kinds.BoolType) -> Schema:
        return {"type": "boolean"}

    @write.register
    def _(self, kind: kinds.IntType) -> Schema:
        return _number("integer", kind)

    @write.register
    def _(self, kind: kinds.FloatType) -> Schema:
        return _number("number", kind)

    @write.register
    def _(self, kind: kinds.StrType) -> Schema:
        found = _limits(
            {"type": "string"}, kind, min_length="minLength", max_length="maxLength", pattern="pattern"
        )
        return patterns.ascii_where_classes_differ(found)

    @write.register(kinds.BytesType)
    @write.register(kinds.ByteArrayType)
    @write.register(kinds.MemoryViewType)
    def _(self, kind: kinds.BytesType) -> Schema:
        """Return a schema for base64 text; 4 characters encode 3 bytes."""
        found: Schema = {"type": "string", "pattern": patterns.BASE64}
        if kind.max_length is not None:
            found["maxLength"] = 4 * (kind.max_length // 3)
        if kind.min_length is not None:
            found["minLength"] = 4 * -(-(kind.min_length + 2) // 3)
        if found.get("maxLength", 4) == 0 or found.get("minLength", 0) > found.get("maxLength", 2**62):
            raise InvalidRequest(
                "bytes of these lengths are not supported; leave at least 3 bytes between minimum and maximum"
            )
        return found

    @write.register
    def _(self, kind: kinds.DateTimeType) -> Schema:
        naive = {"pattern": patterns.NAIVE_DATETIME}
        return {"type": "string", **(naive if kind.tz is False else {"format": "date-time"})}

    @write.register
    def _(self, kind: kinds.TimeType) -> Schema:
        said = {"pattern": patterns.NAIVE_TIME} if kind.tz is False else {"format": "time"}
        return {"type": "string", **said}

    @write.register
    def _(self, kind: kinds.DateType) -> Schema:
        return {"type": "string", "format": "date"}

    @write.register
    def _(self, kind: kinds.TimeDeltaType) -> Schema:
        return {"type": "string", "format": "duration", "pattern": patterns.CLOCK_DURATION}

    @write.register
    def _(self, kind: kinds.UUIDType) -> Schema:
        return {"type": "string", "format": "uuid"}

    @write.register
    def _(self, kind: kinds.DecimalType) -> Schema:
        return {"type": "string", "pattern": patterns.NUMBER_KEY}

    @write.register
    def _(self, kind: kinds.CollectionType) -> Schema:
        found: Schema = {"type": "array", "items": self.write(kind.item_type)}
        if isinstance(kind, kinds.SetType | kinds.FrozenSetType):
            _check_hash(kind.item_type)
            if isinstance(kind.item_type, kinds.AnyType | kinds.RawType):
                found["items"] = {"type": patterns.PLAIN_TYPES}
            found["uniqueItems"] = True
        return _limits(found, kind, min_length="minItems", max_length="maxItems")

    @write.register
    def _(self, kind: kinds.TupleType) -> Schema:
        size = len(kind.item_types)
        items = [self.write(item) for item in kind.item_types]
        return {
            "type": "array",
            **({"prefixItems": items} if items else {}),
            "items": False,
            "minItems": size,
            "maxItems": size,
        }

    @write.register(kinds.DictType)
    @write.register(kinds.FrozenDictType)
    def _(self, kind: kinds.DictType) -> Schema:
        sizes = _limits({}, kind, min_length="minProperties", max_length="maxProperties")
        keys = self.write(kind.key_type)
        return dict_schema(self.definitions.get(_named(keys), keys), self.write(kind.value_type), sizes)

    @write.register
    def _(self, kind: kinds.UnionType) -> Schema:
        return {"anyOf": [self.write(each) for each in kind.types]}

    @write.register
    def _(self, kind: kinds.LiteralType) -> Schema:
        return {"enum": list(kind.values)}

    @write.register
    def _(self, kind: kinds.EnumType) -> Schema:
        return self._defined(kind.cls, lambda: {"enum": [to_builtins(each.value) for each in kind.cls]})

    @write.register(kinds.StructType)
    @write.register(kinds.TypedDictType)
    @write.register(kinds.DataclassType)
    @write.register(kinds.NamedTupleType)
    def _(self, kind: _Fields) -> Schema:
        return self._defined(kind.cls, lambda: self._fields(kind))

    @write.register
    def _(self, kind: kinds.CustomType) -> Schema:
        if not (isinstance(kind.cls, type) and issubclass(kind.cls, PurePath)):
            raise TypeError(f"{kind.cls} is not supported")
        return {"type": "string"}

    def _defined(self, cls: object, make: Callable[[], Schema]) -> Schema:
        """Return a reference to a named type. The first call also writes the type's definition."""
        name = self._names.get(cls)
        if name is None:
            plain = re.sub(r"\W", "_", getattr(cls, "__name__", str(cls)), flags=re.ASCII)
            name = plain if plain not in self.definitions else f"{plain}_{len(self.definitions)}"
            self._names[cls], self.definitions[name] = name, {}
            self.definitions[name] = make()
        return {"$ref": f"#/$defs/{name}"}

    def _fields(self, kind: _Fields) -> Schema:
        names, fields, required = [], [], []
        if isinstance(kind, kinds.StructType) and kind.tag_field is not None:
            names.append(kind.tag_field)
            fields.append({"enum": [kind.tag]})
            required.append(kind.tag_field)
        for field in kind.fields:
            names.append(field.encode_name)
            fields.append(self.write(field.type))
            if field.required:
                required.append(field.encode_name)
        if isinstance(kind, kinds.NamedTupleType) or getattr(kind, "array_like", False):
            sizes = {"minItems": len(required), "maxItems": len(fields)}
            return {"type": "array", **({"prefixItems": fields} if fields else {}), "items": False, **sizes}
        said = {"properties": dict(zip(names, fields, strict=True)), "required": required}
        return {"type": "object", **said, "additionalProperties": False}


def _named(schema: Schema) -> str:
    """Return the name in a reference to a definition, or "" for any other schema."""
    return schema.get("$ref", "").removeprefix("#/$defs/")
