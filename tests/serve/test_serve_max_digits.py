"""Tests max_digits, the engine's limit on the digits of a number, in answers, notes and the log."""

from pathlib import Path

import pytest

from mmengine.config import EngineConfig
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader
from mmengine.replay.verify import verify
from mmengine.serve.engine.engine import Engine

pytest.importorskip("mmengine_shapes")


def form(schema: object, **fields: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"schema": schema}, **fields}


def test_a_model_that_never_ends_a_number_stops_at_the_maximum(tmp_path: Path) -> None:
    with Engine(config=EngineConfig(max_digits=7, spec="grammar"), log=tmp_path / "log") as engine:
        tokenizer = engine.processor.tokenizer
        (nine,) = tokenizer.encode("9")
        asked = {"max_tokens": 60, "logit_bias": {nine: 100.0}}
        found = []
        for schema, fields in (
            ({"type": "integer"}, {}),
            ({"type": "array", "items": {"type": ["number", "null"]}, "minItems": 1, "maxItems": 1}, {}),
            ({"type": "integer"}, {"bounds": {"max_digits": 3}}),
            ({"type": "integer"}, {"bounds": False}),
            ({"type": "integer", "minimum": 0, "maximum": 999_999_999}, {}),
        ):
            (answer,) = engine.generate("How many?", response_format=form(schema, **fields), **asked)
            found.append((answer.text.strip(), answer.finish_reason, len(answer.notes)))
    assert found[0] == ("9" * 7, "stop", 1)
    assert found[2] == ("9" * 3, "stop", 1)
    assert found[3] == ("9" * 60, "length", 0)
    assert found[4] == ("9" * 9, "stop", 0)
    assert "".join(found[1][0].split()) == "[9999999.9999999]" and found[1][1:] == ("stop", 1)
    events = [record.event for record in LogReader(tmp_path / "log")]
    started = next(event for event in events if isinstance(event, ev.Started))
    assert b"max_digits" in repr(started).encode()
    queued = [event.grammar for event in events if isinstance(event, ev.Queued)]
    assert [grammar.max_digits for grammar in queued if grammar is not None] == [7, 7, 3, 0, 7]
    assert verify(tmp_path / "log").divergence is None
