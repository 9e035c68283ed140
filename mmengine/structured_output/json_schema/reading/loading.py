"""Loads schemas from JSON text, and writes values as JSON text. Refuses text that is not JSON, is too large,
or is nested too deeply.
"""

import json
from collections.abc import Callable

from mmengine.structured_output.json_schema.vocabulary.keywords import show_value
from mmengine.structured_output.json_schema.vocabulary.refusal import SchemaRefused, refuse

MAX_BYTES = 2 * 2**20  # Maximum size of a schema's JSON text in bytes.
MAX_NESTING = 200  # Maximum nesting depth of arrays and objects, including values in enum and const.
MANY = 2_000  # An array or object with at least this many values is encoded member by member.
_HOLDING = frozenset((dict, list))
# json.dumps would build this encoder on every call.
_write: Callable[[object], str] = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


def encode(value: object) -> str:
    """Return a value as JSON text. Raises TypeError, ValueError and RecursionError.

    For a value with many small objects, the encoder holds the GIL for 10 ms per MB. Large values are
    therefore encoded member by member, so that other threads can run.
    """
    if _has_many(value):
        if isinstance(value, list):
            return f"[{', '.join([encode(each) for each in value])}]"
        if isinstance(value, dict) and all(isinstance(name, str) for name in value):
            return f"{{{', '.join([f'{_write(name)}: {encode(each)}' for name, each in value.items()])}}}"
    return _write(value)


def _has_many(value: object) -> bool:
    level = [value] if isinstance(value, dict | list) else []
    count = 0
    while level and count < MANY:
        count += sum(map(len, level))
        members = [each.values() if isinstance(each, dict) else each for each in level]
        level = [each for some in members for each in some if each.__class__ in _HOLDING]
    return count >= MANY


def dumps(schema: object) -> str:
    try:
        return encode(schema)
    except RecursionError:
        refuse("", "", "nested too deeply")
    except (TypeError, ValueError) as error:
        refuse("", "", f"not JSON ({error})")


def parse_schema(schema: object) -> object:
    """Return a schema as a private copy.

    The input is JSON text or decoded JSON (Python values).
    """
    return loads(schema if isinstance(schema, str | bytes) else dumps(schema))


def loads(text: str | bytes) -> object:
    if len(text) > MAX_BYTES:
        refuse("", "", f"the schema has more than {MAX_BYTES:,} bytes")
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8-sig")
        text = text.removeprefix("\ufeff")
        text.encode()
        value = _decode(text)
        _check_nesting(value)
    except UnicodeEncodeError:
        refuse("", "", "contains an unpaired surrogate, which is not valid text")
    except UnicodeDecodeError:
        refuse("", "", "not UTF-8")
    except RecursionError:
        refuse("", "", f"nested more than {MAX_NESTING} levels deep")
    except SchemaRefused:
        raise
    except ValueError as error:
        refuse("", "", f"not JSON ({error})")
    return value


def _check_nesting(value: object) -> None:
    level, depth = [value] if isinstance(value, dict | list) else [], 0
    while level:
        depth += 1
        if depth > MAX_NESTING:
            refuse("", "", f"nested more than {MAX_NESTING} levels deep")
        members = [each.values() if isinstance(each, dict) else each for each in level]
        level = [each for some in members for each in some if each.__class__ in _HOLDING]


def _pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    out = dict(pairs)
    if len(out) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        refuse("", "", f"the key {show_value(twice)} appears twice in one object")
    return out


def _constant(name: str) -> object:
    refuse("", "", f"{name} is not JSON")


def _float(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        refuse("", "", f"the number {text[:40]} is too large")
    return value


_decode = json.JSONDecoder(object_pairs_hook=_pairs, parse_constant=_constant, parse_float=_float).decode
