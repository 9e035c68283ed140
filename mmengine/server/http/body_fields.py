"""Tables of the fields in request bodies: whether the server supports, translates or refuses each field. Body
structs annotate their fields with this module's functions. Request checks and the HTTP reference use the
annotations.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, get_args, get_type_hints

import msgspec
from msgspec import Meta

from mmengine.errors import FIELD, ErrorCode, FieldPath, shown
from mmengine.server.http.errors import ApiError, decode_body

MAX_FIELDS = 256
IGNORED_HEADER = "x-mmengine-ignored-fields"
_MAX_DROPPED_CHARS = 1000
_MAX_NEUTRAL_BYTES = 256  # Larger values are never neutral.
_REFUSED = ("optional", "refused")
_NULL = b"null"
_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_value = msgspec.json.Decoder().decode


class Field(NamedTuple):
    """How the server treats a body field.

    `says`: the alternative if the field is refused; otherwise the field's meaning. `neutral`: values without
    an effect, accepted even in a refused field. If `how` is "optional", a lenient server ignores the field,
    and a strict server refuses the field. `inner`: the names that the field's object may contain; empty if
    msgspec refuses unknown names or the type is not a struct.
    """

    name: str
    how: Literal["taken", "translated", "ignored", "optional", "refused"]
    says: str
    neutral: tuple[object, ...] = ()
    inner: tuple[str, ...] = ()


def supported(says: str) -> Meta:
    """Return the annotation for a field that means the same as in the API that the route implements."""
    return Meta(description=says, extra={"how": "taken"})


def translated_field(says: str) -> Meta:
    """Return the annotation for a field whose meaning differs from the API that the route implements. `says`
    explains the difference.
    """
    return Meta(description=says, extra={"how": "translated"})


def fields_of(body: type[msgspec.Struct]) -> tuple[Field, ...]:
    """Return the fields of `body` in the order of the struct. Each field must have an annotation from
    `supported` or `translated_field`.
    """
    hints = get_type_hints(body, include_extras=True)
    found = []
    for name in body.__struct_fields__:
        (meta,) = (each for each in hints[name].__metadata__ if isinstance(each, Meta) and each.extra)
        assert meta.extra is not None
        found.append(Field(name, meta.extra["how"], meta.description or "", (), _inner_names(hints[name])))
    return tuple(found)


def _inner_names(hint: object) -> tuple[str, ...]:
    """Return `Field.inner` for a field with the type `hint`."""
    for one in get_args(get_args(hint)[0]):
        if isinstance(one, type) and issubclass(one, msgspec.Struct):
            return () if one.__struct_config__.forbid_unknown_fields else one.__struct_fields__
    return ()


class Fields:
    """A field table: looks fields up by name and checks bodies."""

    def __init__(self, fields: Iterable[Field]):
        self.by_name = {field.name: field for field in fields}
        self._usable = [field.name for field in self.by_name.values() if field.how not in _REFUSED]
        self.names = frozenset(self._usable)

    def check(self, body: bytes, *, ignore_unknown: bool, is_lenient: bool = False) -> list[str]:
        """Return the ignored fields' names. Raises ApiError for the first refused field.

        `ignore_unknown`: whether unknown fields are ignored. `is_lenient`: whether optional fields are
        ignored.
        """
        given = decode_body(body, _decode)
        return self.check_given(given, ignore_unknown=ignore_unknown, is_lenient=is_lenient)

    def check_given(
        self, given: Mapping[str, msgspec.Raw], *, ignore_unknown: bool, is_lenient: bool = False
    ) -> list[str]:
        """Check a body that is already decoded, in the same way as `check`."""
        if len(given) > MAX_FIELDS:
            raise ApiError(
                ErrorCode.INVALID_VALUE, f"the body has {len(given)} fields; the limit is {MAX_FIELDS}"
            )
        ignored = []
        for name, raw in given.items():
            field = self.by_name.get(name)
            # Compare the lengths first, because `bytes` would copy a large value.
            if len(raw) == len(_NULL) and bytes(raw) == _NULL:
                continue
            if field is None:
                if not ignore_unknown:
                    raise self._unknown(name)
                ignored.append(name)
            elif field.how in _REFUSED and not _is_neutral(field, raw):
                if field.how == "refused" or not is_lenient:
                    raise _refusal(field)
                ignored.append(name)
            elif field.inner and bytes(memoryview(raw)[:1]) == b"{":
                for inner in decode_body(raw, _decode).keys() - set(field.inner):
                    if not ignore_unknown:
                        raise ApiError(
                            ErrorCode.UNKNOWN_FIELD,
                            f"{FIELD} is unknown; use {', '.join(field.inner)}",
                            FieldPath(name, inner[:64]),
                        )
                    ignored.append(f"{name}.{inner[:64]}")
        return ignored

    def _unknown(self, name: str) -> ApiError:
        near = difflib.get_close_matches(name[:64], self._usable, 1)
        hint = f"; did you mean {near[0]}?" if near else "; leave it out"
        return ApiError(ErrorCode.UNKNOWN_FIELD, f"unknown field {shown(name)}{hint}", name[:64])


def _is_neutral(field: Field, raw: msgspec.Raw) -> bool:
    """Whether a refused field has a value without an effect. Raises ApiError for invalid UTF-8 or an invalid
    number.
    """
    if not field.neutral or len(raw) > _MAX_NEUTRAL_BYTES:
        return False
    value = decode_body(raw, _decode_value)
    return any(type(value) is type(one) and value == one for one in field.neutral)


def _refusal(field: Field) -> ApiError:
    return ApiError(ErrorCode.UNSUPPORTED_FIELD, f"{FIELD} is not supported; {field.says}", field.name)


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """Return the header that lists the ignored fields, or no header if `names` is empty."""
    shown_names = ", ".join(name for name in names if name.isascii() and name.isprintable())
    return {IGNORED_HEADER: shown_names[:_MAX_DROPPED_CHARS]} if names else {}
