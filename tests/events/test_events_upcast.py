"""What old logs say, in today's fields."""

import msgspec
import pytest

from mmengine.events import codec, format_1
from mmengine.events import vocabulary as ev
from mmengine.events.codec import UnknownRecord
from mmengine.events.upcast import UPCASTERS
from mmengine.request import GrammarRequest, SamplingParams
from tests.events.test_events_codec import old_record, read, record_of

CLOSES = ',"on_truncation":"close"}'
TAG = '"structures":[{"begin":"<a>","schema":{"type":"object"},"end":"</a>"}],"triggers":["<a"]'


@pytest.mark.parametrize("fmt", [format_1, codec])
@pytest.mark.parametrize(
    ("text", "grammar"),
    [
        ('{"type":"json_schema","schema":{ "b":1,"a":"é"}}', ("json_schema", '{ "b":1,"a":"é"}')),
        ('{"type":"regex","regex":"\\\\d\\n"}', ("regex", "\\d\n")),
        ('{"after":[7,9],"type":"regex","regex":"a"}', ("regex", "a", (7, 9))),
        (
            '{"after":[7],"type":"lark","lark":"start: \\"a\\""' + CLOSES,
            ("lark", 'start: "a"', (7,), "close"),
        ),
        ('{"type":"choice","choices":["a","\\u00e9"]' + CLOSES, ("choice", '["a","\\u00e9"]', (), "close")),
        ('{"type":"structural_tag",' + TAG + "}", ("structural_tag", "{" + TAG + "}")),
        ('{"after":[7],"type":"structural_tag",' + TAG + "}", ("structural_tag", "{" + TAG + "}", (7,))),
        ("redacted" + CLOSES, ("", "redacted" + CLOSES, (), "close")),  # by mmengine log redact
        ("grammar", ("", "grammar")),
        ("", ("", "")),
        ("[" * 9999, ("", "[" * 9999)),
        ('{"type":"regex"}', ("", '{"type":"regex"}')),
        ('{"type":"regex","regex":1}', ("", '{"type":"regex","regex":1}')),
        ('{"after":[-1],"type":"regex","regex":"a"}', ("", '{"after":[-1],"type":"regex","regex":"a"}')),
        ("x" * 70_000, ("", "x" * 70_000)),
    ],
)
def test_a_grammar_that_was_a_text_up_to_schema_2_is_told_in_its_fields(fmt, text, grammar):
    event = ev.Queued("a", b"12", SamplingParams(), grammar=GrammarRequest(*grammar), group="b")
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(event))
    fields[8] = text
    body, wrapped = msgspec.msgpack.encode(fields), old_record if fmt is format_1 else record_of
    (record,) = read(wrapped(body, number=2), 0, fmt)
    assert record.event == event
    (again,) = read(wrapped(msgspec.msgpack.encode(event), number=2), 0, fmt)
    assert again.event == event


def test_no_array_of_fields_is_made_of_an_endless_body():
    """Of 65 fields, more than any event has, none is looked at."""
    with pytest.raises(UnknownRecord, match="length <= 64"):
        read(record_of(msgspec.msgpack.encode([0] * 65), number=2))


def test_an_upcaster_says_what_an_old_field_means(monkeypatch):
    monkeypatch.setitem(UPCASTERS, (1, 9), lambda fields: [fields[0], "stop", *fields[2:]])
    body = msgspec.msgpack.encode(["a", "finished", "eos"])
    assert read(old_record(body, number=9), framing=format_1)[0].event == ev.Finished("a", "stop", "eos")
    assert read(record_of(body, number=9))[0].event == ev.Finished("a", "finished", "eos")
    with pytest.raises(UnknownRecord, match="its body is no Finished"):
        read(old_record(b"\x05", number=9), framing=format_1)


def test_a_setting_that_an_old_log_has_is_kept():
    event = ev.Started(1, "0", 1, {"max_in_flight": 2}, {}, 9)
    data = old_record(msgspec.msgpack.encode(event), number=1)
    assert read(data, framing=format_1)[0].event == event
