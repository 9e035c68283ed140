"""Notes on a response format reach the caller and the operator log."""

import asyncio
import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from mmengine.serve.async_engine.async_engine import AsyncEngine
from mmengine.serve.batch.request_file import RequestFile
from mmengine.serve.batch.run_batch import run_batch
from mmengine.serve.engine.engine import Engine

pytest.importorskip("mmengine_shapes")

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "format": "topic", "maxLength": 3}},
    "x-order": 1,
}


def form(**others: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": SCHEMA, **others}}


NOTED = ["#/x-order", "#/properties/a/format"]
STRICT = ["#", "#"]  # notes on an optional property and on additionalProperties
DIGITS = ["#"]  # a note that numbers in additional properties have a maximum number of digits


def test_notes_come_with_the_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ask = {"on_truncation": "close"}
    caplog.set_level(logging.INFO, "mmengine.operators")
    with Engine() as engine:
        plain = engine.generate(["What?", "Which?"], response_format=form() | ask)
        strict = engine.generate(["What?"], response_format=form(strict=True) | ask)[0]
        assert not engine.generate(["What?"], max_tokens=2)[0].notes
        line = {"custom_id": "a", "messages": [{"role": "user", "content": "What?"}]}
        file = io.BytesIO(json.dumps({**line, "response_format": form() | ask}).encode())
        source = RequestFile(file, tmp_path)
        answers = [json.loads(source.answer_line(*each)) for each in run_batch(engine, source)]
    assert [[note.pointer for note in each.notes] for each in plain] == [NOTED + DIGITS] * 2
    assert [note.pointer for note in strict.notes] == NOTED + STRICT + DIGITS
    assert all("OpenAI's strict mode refuses it" in note.text for note in strict.notes[2:4])
    assert "at most 40 digits" in plain[0].notes[-1].text
    assert [note["pointer"] for note in answers[0]["notes"]] == NOTED + DIGITS
    lines = [each for each in caplog.messages if "form has notes" in each]
    assert ["count=3" in each for each in lines] == [True, False], "once for each form"
    assert "#/x-order: unknown" in lines[0] and "count=5" in lines[1]

    async def ask_async() -> Any:
        async with AsyncEngine() as engine:
            return await engine.generate("What?", response_format=form() | ask)

    assert [note.pointer for note in asyncio.run(ask_async()).notes] == NOTED + DIGITS
