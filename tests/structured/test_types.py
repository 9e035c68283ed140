"""Test Python types as schemas, and answers decoded to these types."""

import base64
from dataclasses import dataclass
from datetime import date
from enum import Enum
from typing import Literal

import msgspec
import pytest

from mmengine.errors import InvalidRequest, RequestFailed
from mmengine.structured_output.types.types import decode, schema_of
from tests.structured.accepting import Grammar


class Unit(Enum):
    EACH = "each"
    KG = "kg"


class Item(msgspec.Struct):
    name: str
    price: float
    unit: Unit = Unit.EACH


class Receipt(msgspec.Struct):
    day: date
    items: list[Item]
    note: str | None = None


class Cat(msgspec.Struct, tag=True):
    lives: int


class Dog(msgspec.Struct, tag=True):
    name: str


@dataclass
class Point:
    x: int
    y: int
    kind: Literal["a", "b"] = "a"


CASES = [
    (Receipt, '{"day":"2024-02-29","items":[{"name":"é","price":1.5}]}', '{"day":"2024-02-30","items":[]}'),
    (Point, '{"x":1,"y":2,"kind":"b"}', '{"x":1}'),
    (list[int], "[1,2]", '["a"]'),
    (Cat | Dog, '{"type":"Dog","name":"x"}', '{"type":"Cow"}'),
    (dict[str, bool], '{"a":true}', '{"a":1}'),
    (bytes, '"aGk="', '"aGk"'),
]


@pytest.mark.parametrize(("what", "good", "bad"), CASES)
def test_type(what: object, good: str, bad: str) -> None:
    grammar = Grammar(schema_of(what))
    assert grammar.accepts(good) and not grammar.accepts(bad)
    decoded = decode(good, what)
    assert msgspec.json.decode(msgspec.json.encode(decoded), type=what) == decoded
    with pytest.raises(RequestFailed, match="the answer is not a valid"):
        decode(bad, what)


def test_schemas_stay_as_they_are() -> None:
    schema = {"type": "null"}
    assert schema_of(schema) is schema and decode("null", schema) is None
    with pytest.raises(RequestFailed):
        decode('{"cut": "sho', schema)


def test_types_without_a_schema() -> None:
    with pytest.raises(InvalidRequest, match="complex"):
        schema_of(complex)


def test_only_the_fields_are_keys() -> None:
    grammar = Grammar(schema_of(Receipt))
    assert not grammar.accepts('{"day":"2024-02-29","items":[],"extra":1}')
    assert not grammar.accepts('{"day":"2024-02-29","items":[{"name":"é","price":1.5,"extra":1}]}')
    assert Grammar(schema_of(dict[str, Point])).accepts('{"any":{"x":1,"y":2}}')


def test_bytes_are_base64() -> None:
    grammar = Grammar(schema_of(bytes))
    for length in range(7):
        assert grammar.accepts(msgspec.json.encode(base64.b64encode(bytes(length)).decode()).decode())


class LikePydantic:
    """Has the two methods of pydantic models that mmengine calls."""

    @classmethod
    def model_json_schema(cls) -> dict:
        return {"type": "integer", "title": "Like"}

    @classmethod
    def model_validate_json(cls, text: str) -> int:
        value = int(text)
        if value % 2:
            raise ValueError("odd")
        return value


def test_a_class_like_pydantics() -> None:
    assert Grammar(schema_of(LikePydantic)).accepts("2") and decode("2", LikePydantic) == 2
    with pytest.raises(RequestFailed, match="not a valid LikePydantic: odd"):
        decode("3", LikePydantic)


def test_a_pydantic_model() -> None:
    pydantic = pytest.importorskip("pydantic")
    model = pydantic.create_model("Total", euros=(float, ...), tags=(list[str] | None, None))
    grammar = Grammar(schema_of(model))
    assert grammar.accepts('{"euros":1.5,"tags":["a"]}') and not grammar.accepts('{"tags":null}')
    assert decode('{"euros":1.5}', model).euros == 1.5
    with pytest.raises(RequestFailed, match="Total"):
        decode("{}", model)
