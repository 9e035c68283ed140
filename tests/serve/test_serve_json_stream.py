"""Tests `stream_json`: values grow during an answer, and the last value is complete."""

import asyncio
import errno
from contextlib import suppress
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from mmengine.config import EngineConfig
from mmengine.errors import InvalidRequest, LogError, RequestFailed
from mmengine.events.log import LogWriter
from mmengine.request import SamplingParams
from mmengine.serve.async_engine.async_engine import AsyncEngine
from mmengine.serve.batch.run_batch import run_batch
from mmengine.serve.engine.engine import Engine
from mmengine.serve.prompt.options import Options
from mmengine.serve.prompt.prompt import Prompt
from tests.structured.test_partial_json import goes_on

pytest.importorskip("mmengine_shapes")

RECORD = {
    "type": "object",
    "properties": {
        "shape": {"enum": ["circle", "square", "größe"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 2},
        "note": {"type": "string", "minLength": 3, "maxLength": 9},
    },
    "required": ["shape", "sizes", "note"],
    "additionalProperties": False,
}
HOT = {"temperature": 1.5, "seed": 4, "max_tokens": 200, "on_truncation": "close"}


LIST = {"type": "array", "items": {"enum": ["ab", "cabd", "größe"]}, "minItems": 3, "maxItems": 5}


class Shape(msgspec.Struct):
    name: str
    corners: int


def check(values: list[Any], whole: Any) -> None:
    assert len(values) > 3 and values[-1] == whole
    assert all(map(goes_on, values, values[1:]))
    assert {} in values and any(value != whole and value.get("shape") for value in values)


@pytest.mark.parametrize("stop", ["ab", ",", "öß", '"'])
def test_text_after_a_stop_string_is_in_no_value(stop: str) -> None:
    options = {**HOT, "stop": [stop]}
    with Engine() as engine:
        whole = engine.generate_json("What?", LIST, **options)
        values = list(engine.stream_json("What?", LIST, **options))
        assert values[-1] == whole and all(map(goes_on, values, values[1:]))

    async def ask() -> list[Any]:
        async with AsyncEngine() as other:
            return [value async for value in other.stream_json("What?", LIST, **options)]

    assert asyncio.run(ask()) == values


def test_values_grow_to_the_whole_value() -> None:
    with Engine() as engine:
        whole = engine.generate_json("What?", RECORD, **HOT)
        jsonschema.validate(whole, RECORD)
        check(list(engine.stream_json("What?", RECORD, **HOT)), whole)
        assert engine.is_idle

    async def ask() -> list[list[Any]]:
        async def one() -> list[Any]:
            return [value async for value in engine.stream_json("What?", RECORD, **HOT)]

        async with AsyncEngine() as engine:
            return await asyncio.gather(one(), one())

    for values in asyncio.run(ask()):
        check(values, whole)


def test_the_last_value_is_of_the_type() -> None:
    with Engine() as engine:
        *parts, last = engine.stream_json("What?", Shape, on_truncation="close")
        assert parts and all(isinstance(part, dict) for part in parts) and isinstance(last, Shape)


def test_between_two_answers_of_a_batch_it_takes_none_of_them() -> None:
    # `stream_json` may be called between two answers of a batch. The batch still returns all its answers.
    jobs = [(Prompt.of("What?"), Options(SamplingParams(max_tokens=2 + k % 3))) for k in range(6)]
    with Engine(config=EngineConfig(max_num_seqs=4)) as engine:
        batch = run_batch(engine, iter(jobs))
        found = [next(batch)]
        assert list(engine.stream_json("What?", {"enum": ["a", "b"]}))[-1] in ("a", "b")
        stream = engine.stream_json("What?", RECORD)
        next(stream)
        stream.close()
        found += batch
    assert sorted(index for index, _ in found) == list(range(6))


def test_it_does_not_wait_for_room_on_the_disk_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Closing the stream cancels its request, which the log cannot record on a full disk.
    def full(self: LogWriter, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    engine = Engine(log=tmp_path / "log")
    stream = engine.stream_json("What?", RECORD)
    next(stream)
    monkeypatch.setattr("mmengine.serve.requests.health.STALL_PAUSE_S", 0.001)
    monkeypatch.setattr("mmengine.serve.batch.run_batch.ABANDON_LIMIT_S", 0.05)
    monkeypatch.setattr(LogWriter, "_write", full)
    with pytest.raises(LogError, match="No space left"):
        stream.close()
    with suppress(LogError):
        engine.close()


def test_a_json_stream_is_cut_like_a_value_and_can_be_left() -> None:
    """A stream raises if max_tokens cuts the JSON. Closing a stream cancels its request."""
    with Engine() as engine:
        stream = engine.stream_json("What?", RECORD, max_tokens=3)
        with pytest.raises(RequestFailed, match="the JSON is incomplete after 3 tokens"):
            list(stream)
        stream = engine.stream_json("What?", RECORD)
        assert next(stream) == {} and not engine.is_idle
        with pytest.raises(InvalidRequest, match="are running"):
            engine.generate(["What?"])
        stream.close()
        assert engine.is_idle and engine.generate(["What?"], max_tokens=2)[0].finish_reason == "length"
        with pytest.raises(InvalidRequest, match="generate_json gives one value"):
            next(engine.stream_json("What?", RECORD, n=2))
