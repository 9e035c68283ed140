"""What events of older formats mean in today's words.

A field that an old record lacks takes its default; that covers most. Where the default of today is not
what an old build did, or a field was written in another way, an upcaster, found by (format, type number),
changes the fields before the event is made of them. An upcaster is pure, and stays for ever.
"""

from collections.abc import Callable
from typing import Annotated

import msgspec

from mmengine.request import TokenIds

GRAMMAR = 8  # the field of QUEUED
MAX_FIELDS = 64  # of an event, far more than one has
Fields = list[msgspec.Raw]
_fields = msgspec.msgpack.Decoder(Annotated[Fields, msgspec.Meta(max_length=MAX_FIELDS)])
_CLOSES = ',"on_truncation":"close"}'
_SOURCES = {"json_schema": "schema", "regex": "regex", "choice": "choices", "lark": "lark"}


def in_todays_words(
    fmt: int, number: int, body: bytes | memoryview | msgspec.Raw
) -> bytes | memoryview | msgspec.Raw:
    """The body of an event as today's builds write it. Raises MsgspecError for one that is no array."""
    upcast = UPCASTERS.get((fmt, number))
    return body if upcast is None else msgspec.msgpack.encode(upcast(_fields.decode(body)))


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(value))


def _started_1(fields: Fields) -> Fields:
    """Builds of format 1 had one step in flight where the settings do not say."""
    if len(fields) > 3:
        config = msgspec.msgpack.decode(fields[3])
        if isinstance(config, dict):
            fields[3] = _raw({"max_in_flight": 1, **config})
    return fields


def _queued_2(fields: Fields) -> Fields:
    """Up to schema 2 a grammar is one text: of JSON, that begins with what it waits for, and ends with what
    becomes of it where the budget ends."""
    if len(fields) > GRAMMAR and _is_text(fields[GRAMMAR]):
        fields[GRAMMAR] = _raw(_grammar_in(msgspec.msgpack.decode(fields[GRAMMAR], type=str)))
    return fields


def _is_text(value: msgspec.Raw) -> bool:
    first = bytes(memoryview(value)[:1])[0]
    return 0xA0 <= first <= 0xBF or 0xD9 <= first <= 0xDB  # msgpack's strings


def _grammar_in(text: str) -> tuple[str, str, tuple[int, ...], str]:
    """Fields of a GrammarRequest. A text that no build made, as those of a redacted log, is of no kind."""
    truncation = "close" if text.endswith(_CLOSES) else "length"
    try:
        parts = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        kind = msgspec.json.decode(parts.pop("type"), type=str)
        after = msgspec.json.decode(parts.pop("after", b"[]"), type=TokenIds)
        parts.pop("on_truncation", None)
        if kind == "structural_tag":
            return kind, msgspec.json.encode(parts).decode(), after, truncation
        source = bytes(parts[_SOURCES[kind]]).decode()
        is_plain = kind in ("regex", "lark")
        return kind, msgspec.json.decode(source, type=str) if is_plain else source, after, truncation
    except (msgspec.MsgspecError, UnicodeError, RecursionError, KeyError):
        return "", text, (), truncation


UPCASTERS: dict[tuple[int, int], Callable[[Fields], Fields]] = {
    (1, 1): _started_1,
    (1, 2): _queued_2,
    (2, 2): _queued_2,
}
