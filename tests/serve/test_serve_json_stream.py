"""Values while they are written: none contradicts the one before, and the last is the whole value."""

import asyncio
from typing import Any

import jsonschema
import msgspec
import pytest

from mmengine.errors import InvalidRequest, RequestFailed
from mmengine.serve.async_engine import AsyncEngine
from mmengine.serve.engine import Engine
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


class Shape(msgspec.Struct):
    name: str
    corners: int


def check(values: list[Any], whole: Any) -> None:
    assert len(values) > 3 and values[-1] == whole
    assert all(map(goes_on, values, values[1:]))
    assert {} in values and any(value != whole and value.get("shape") for value in values)


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


def test_it_is_cut_like_a_whole_value_and_can_be_left() -> None:
    with Engine() as engine:
        stream = engine.stream_json("What?", RECORD, max_tokens=3)
        with pytest.raises(RequestFailed, match="the JSON is incomplete after 3 tokens"):
            list(stream)
        stream = engine.stream_json("What?", RECORD)
        assert next(stream) == {} and not engine.is_idle
        with pytest.raises(InvalidRequest, match="are on their way"):
            engine.generate(["What?"])
        stream.close()
        assert engine.is_idle and engine.generate(["What?"], max_tokens=2)[0].finish_reason == "length"
        with pytest.raises(InvalidRequest, match="generate_json gives one value"):
            next(engine.stream_json("What?", RECORD, n=2))
