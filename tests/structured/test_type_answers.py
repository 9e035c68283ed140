"""Test many types with random answers that the grammar's masks allow: each answer decodes to the type."""

import collections
import datetime as dt
import ipaddress
import random
import uuid
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum, IntEnum
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, Optional, Union

import msgspec
import pydantic
import pytest
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from typing_extensions import TypedDict  # Before Python 3.12, pydantic requires this TypedDict.

from mmengine.errors import InvalidRequest
from mmengine.structured_output.json_schema.normalization import Bounds
from mmengine.structured_output.types.types import decode, schema_of
from tests.structured.accepting import Grammar

# Short strings and numbers, so that random answers end.
SHORT = Bounds(whitespace=1, string=80, digits=12, key=6)
WALKS, LENGTH = 12, 700


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Item(BaseModel):
    name: str
    price: Annotated[Decimal, Field(ge=0, max_digits=6, decimal_places=2)]
    color: Color = Color.RED


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: Annotated[int, Field(ge=1, le=9)]


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    lives: Annotated[int, Field(ge=1, le=9)]


class Elsewhere(BaseModel):
    a: int = Field(validation_alias=pydantic.AliasPath("x", 0))


class Named(BaseModel):
    a: int = Field(validation_alias=pydantic.AliasChoices("b", pydantic.AliasPath("x", 0)))


class Ends(Enum):
    START = (0, 0)


class Pointed(BaseModel):
    end: Ends


class Tree(BaseModel):
    leaf: bool
    children: "list[Tree]" = []


class Open(BaseModel):
    model_config = ConfigDict(extra="allow", json_schema_extra={"example": {"a": 1}, "x-order": 3})
    a: int = Field(alias="theA", json_schema_extra={"unit": "m"}, default=3)


class Base64Model(BaseModel):
    model_config = ConfigDict(val_json_bytes="base64")
    data: bytes


class Hex(BaseModel):
    model_config = ConfigDict(val_json_bytes="hex")
    data: bytes


class Spot(TypedDict):
    x: int
    note: NotRequired[Annotated[str, Field(max_length=3)]]


class PlainSpot(TypedDict):
    x: int
    when: NotRequired[dt.time]


class Pair(NamedTuple):
    left: int
    right: Decimal = Decimal(0)


@dataclass
class Owner:
    pet: Cat | None
    born: dt.date


@dataclass
class Plain:
    home: Path
    spans: list[dt.timedelta]
    when: dt.datetime
    at: dt.time
    sums: dict[int, Decimal]


class Wire(msgspec.Struct, tag=True):
    raw: Annotated[bytes, msgspec.Meta(min_length=2, max_length=6)]
    naive: Annotated[dt.datetime, msgspec.Meta(tz=False)]


class Row(msgspec.Struct, tag=True, array_like=True):
    n: Annotated[int, msgspec.Meta(gt=3, multiple_of=2)]


def print_it(text: str) -> None:
    raise AssertionError("nobody asked for a call")


DAY = dt.date(2024, 2, 29)
TYPES: list[Any] = [
    *(
        Item,
        list[Item],
        dict[str, Item],
        tuple[Item, ...],
        Optional[Item],  # noqa: UP045
        Union[Item, int],  # noqa: UP007
        Tree,
        Open,
        Owner,
    ),
    *(TypeAdapter(list[Item]), pydantic.RootModel[list[int]], Spot, PlainSpot, Plain, Pair),
    *(set[Color], frozenset[Level], set[int], Annotated[set[Color], Field(min_length=1)]),
    *(set[Annotated[int, Field(ge=0, le=4)]], collections.deque[bool], collections.Counter[str]),
    *(
        bytes,
        Annotated[bytes, Field(min_length=2, max_length=4)],
        Base64Model,
        Hex,
        Path,
        Wire,
        Row,
        Wire | None,
    ),
    *(pydantic.Base64Bytes, pydantic.Base64UrlStr, pydantic.SecretStr, pydantic.SecretBytes),
    Annotated[Cat | Dog, Field(discriminator="kind")],
    *(Named, set, Annotated[set, Field(max_length=3)]),
    *(Literal["a", 1, None, True], Color, Level, dict[Color, int], dict[Literal["a", "b"], Level]),
    *(dict[int, str], dict[float, int], dict[dt.date, bool], dict[uuid.UUID, int], dict[Decimal, bool]),
    dict[Annotated[str, Field(pattern="^x[a-z]$")], int],
    Annotated[dict[str, int], Field(max_length=2)],
    *(Decimal, Annotated[Decimal, Field(max_digits=4)], Annotated[Decimal, Field(decimal_places=0)]),
    *(
        Annotated[Decimal, Field(decimal_places=3, gt=1, lt=2)],
        Annotated[Decimal, Field(multiple_of=Decimal("0.25"))],
    ),
    *(
        Fraction,
        pydantic.PositiveInt,
        Annotated[float, Field(gt=0, lt=1)],
        Annotated[float, Field(multiple_of=0.5)],
    ),
    *(dt.date, dt.datetime, dt.time, dt.timedelta, Annotated[dt.time, Field(strict=True)]),
    *(pydantic.PastDate, pydantic.FutureDate, pydantic.PastDatetime, pydantic.FutureDatetime),
    *(pydantic.AwareDatetime, pydantic.NaiveDatetime, Annotated[dt.date, Field(ge=DAY)]),
    *(Annotated[dt.date, Field(gt=DAY, lt=dt.date(2024, 3, 4))], Annotated[dt.date, Field(le=DAY)]),
    *(uuid.UUID, pydantic.UUID1, pydantic.UUID4, pydantic.UUID7),
    *(pydantic.HttpUrl, pydantic.AnyUrl, pydantic.FileUrl, pydantic.WebsocketUrl, pydantic.AnyHttpUrl),
    *(pydantic.PostgresDsn, pydantic.RedisDsn, pydantic.MongoDsn, pydantic.KafkaDsn),
    *(ipaddress.IPv4Address, ipaddress.IPv6Address, ipaddress.IPv4Network, ipaddress.IPv6Network),
    *(ipaddress.IPv4Interface, ipaddress.IPv6Interface, pydantic.IPvAnyAddress, pydantic.IPvAnyNetwork),
    *(Annotated[str, pydantic.StringConstraints(strip_whitespace=True, min_length=2)], pydantic.ByteSize),
    *(Annotated[str, Field(pattern=r"^\S\D\W$")], Annotated[str, msgspec.Meta(pattern=r"^\S\D\W$")]),
    *(Annotated[str, Field(min_length=2, max_length=4)], Any, list[Any], bool, None, dict, list),
]


@pytest.mark.parametrize("what", TYPES, ids=range(len(TYPES)))
def test_each_answer_decodes_to_the_type(what: Any) -> None:
    grammar = Grammar(schema_of(what), SHORT)
    source = random.Random(1)
    answers = [text for _ in range(WALKS) if (text := grammar.walk(source, LENGTH)) is not None]
    assert answers, "no random walk ended"
    for text in answers:
        decode(text, what)


REFUSED = [
    (pydantic.FilePath, "a file that exists"),
    (pydantic.Json[int], "JSON within a string"),
    (complex, "complex"),
    (print_it, "a function is checked"),
    (dict[tuple[int, int], int], "keys of a dict"),
    (Annotated[dt.datetime, Field(gt=dt.datetime(2024, 1, 1))], "the range of a datetime"),
    (Annotated[dt.date, Field(gt=dt.date.max)], "outside the supported range"),
    (Annotated[Cat | Dog, pydantic.Discriminator(lambda value: "cat")], "Discriminator"),
    (set[Item], "a set of Item has no hash"),
    (frozenset[list[int]], "a set of ListType has no hash"),
    (set[int | list[int]], "a set of ListType has no hash"),
    (set[Annotated[int, Field(gt=1)] | list[int]], "a set of list has no hash"),
    (type[Item], "a class is checked"),
    (Elsewhere, "an AliasPath"),
    (Pointed, "a Literal or an Enum with values other"),
    (Literal[Color.RED, "x"], "a Literal or an Enum with values other"),
    (Annotated[Literal[b"a"], Field()], "a Literal or an Enum with values other"),
    (range, "range"),
    (object(), "no JSON Schema"),
    (list["Nowhere"], "no JSON Schema"),  # noqa: F821
]


@pytest.mark.parametrize(("what", "says"), REFUSED, ids=range(len(REFUSED)))
def test_types_without_a_schema_are_refused_by_name(what: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        schema_of(what)
