"""Tests the results of `check_schema`: exact, approximated (with the differences), or refused (with the JSON
pointer).
"""

import subprocess
import sys
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel

import mmengine
from mmengine import check_schema
from mmengine.structured_output.json_schema.normalization import Bounds
from mmengine.structured_output.json_schema.vocabulary.formats import EXACT, FORMATS
from mmengine.structured_output.report.narrowing import FORMATS as NARROWER
from mmengine.structured_output.request.strict_mode import strict_notes
from tests.structured.accepting import byte_backend

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["x"],
    "additionalProperties": False,
}


def places(notes: Any) -> list[tuple[str, str]]:
    return [(note.keyword, note.pointer) for note in notes]


def test_exact_but_for_bounds() -> None:
    # The bounds in effect are listed in the report, but the verdict stays "exact".
    report = check_schema(POINT, bounds=Bounds.off(), backend=None)
    assert (report.verdict, report.approximations, report.bounds, report.notes) == ("exact", (), (), ())
    assert report.gate_ms > 0 and report.compile_ms > 0 and report.grammar_bytes > 50 and report.masks is None
    kinds = {"type": ["string", "number", "integer", "object"]}
    for bounds, count in ((Bounds(string=9, digits=9, key=9), 5), (Bounds(), 3), (Bounds(decimals=0), 2)):
        bounded = check_schema(kinds, bounds=bounds)
        assert bounded.verdict == "exact" and len(bounded.bounds) == count
    assert (
        check_schema(POINT | {"type": "object"}).verdict
        == check_schema(b'{"type":"null"}').verdict
        == "exact"
    )


def test_approximations_describe_the_excluded_values() -> None:
    report = check_schema({"properties": {"a~/": {"type": "string", "format": "date-time"}}})
    assert report.verdict == "approximated"
    assert places(report.approximations) == [("format", "#/properties/a~0~1/format")]
    assert "leap seconds" in report.approximations[0].text


def test_narrower_enforcement_is_not_exact() -> None:
    far = {"type": "integer", "minimum": 0, "maximum": 2**64 - 1}
    texts = {"type": "array", "items": {"type": "string"}}
    for schema in (far, {"type": "array", "not": texts}):
        report = check_schema(schema, bounds=Bounds.off())
        assert report.verdict == "approximated" and report.approximations
    first = {"oneOf": [texts, {**texts, "prefixItems": [True]}]}
    assert check_schema(first, bounds=Bounds.off()).verdict == "exact", (
        "only the first item makes a difference"
    )


def test_every_format_is_exact_or_noted_as_narrower() -> None:
    whole = EXACT | {"json-pointer", "relative-json-pointer"}
    assert set(NARROWER) | whole == set(FORMATS) and not set(NARROWER) & whole
    for name in FORMATS:
        verdict = check_schema({"type": "string", "format": name}).verdict
        assert verdict == ("exact" if name in whole else "approximated")


@pytest.mark.parametrize(
    ("schema", "keyword", "pointer"),
    [
        ({"properties": {"a": {"minLength": -1}}}, "minLength", "#/properties/a/minLength"),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, "", "#"),
        ("{", "", "#"),
        (b"\xff", "", "#"),
        ("[" * 100_000, "", "#"),
        ({"$ref": "https://example.com/a"}, "$ref", "#/$ref"),
        (7, "", "#"),
        (BaseModel.model_validate, "", "#"),
    ],
    ids=range(8),
)
def test_refused_with_the_place(schema: Any, keyword: str, pointer: str) -> None:
    report = check_schema(schema)
    assert report.verdict == "refused" and report.why and "Traceback" not in report.why
    assert (report.keyword, report.pointer) == (keyword, pointer)


def test_unknown_keywords_are_noted_or_refused() -> None:
    schema = {"type": "string", "format": "topic", "x-a": 1}
    assert sorted(places(check_schema(schema).notes)) == [("format", "#/format"), ("x-a", "#/x-a")]
    report = check_schema(schema, strict_keywords=True)
    assert (report.verdict, report.keyword, report.pointer) == ("refused", "x-a", "#/x-a")


def test_types_and_masks() -> None:
    class Model(BaseModel):
        day: list[int]

    report = check_schema(list[Model], backend=byte_backend())
    assert report.verdict == "exact" and report.masks is not None
    assert report.masks.count > 10 and 0 < report.masks.mean_us <= report.masks.max_us
    assert msgspec.json.decode(msgspec.json.encode(report), type=mmengine.SchemaReport) == report


STRICT = [
    (POINT, []),
    (POINT | {"description": "taken", "$defs": {"a": {"type": "string", "pattern": "a"}}}, []),
    ({"type": "array", "items": POINT}, [("type", "#")]),
    ({"anyOf": [POINT], "type": "object", "additionalProperties": False}, [("type", "#")]),
    (POINT | {"required": []}, [("required", "#")]),
    (POINT | {"additionalProperties": True}, [("additionalProperties", "#")]),
    (POINT | {"properties": {"x": {"allOf": [{}]}}}, [("allOf", "#/properties/x/allOf")]),
    (POINT | {"properties": {"x": {"enum": [str(n) for n in range(1001)]}}}, [("", "#")]),
    (POINT | {"properties": {"x": {"const": "a" * 120_001}}}, [("", "#")]),
    (True, [("", "#")]),
]


@pytest.mark.parametrize(("schema", "found"), STRICT)
def test_strict_mode_notes(schema: Any, found: list[tuple[str, str]]) -> None:
    assert places(strict_notes(schema)) == found


LONG = """
from mmengine import check_schema
items = {"type": "array", "prefixItems": [{"type": "integer"}] * 2000, "minItems": 1500}
print(check_schema(items).verdict)
"""


def test_long_lists_do_not_overflow_the_stack() -> None:
    result = subprocess.run([sys.executable, "-c", LONG], capture_output=True, text=True, timeout=200)
    assert (result.returncode, result.stdout) == (0, "exact\n"), result.stderr[-300:]


def test_the_limits_of_strict_mode() -> None:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(11):
        deep = POINT | {"properties": {"x": deep}}
    assert "11 levels" in strict_notes(deep)[-1].text
    names = {f"p{n}": {"type": "null"} for n in range(5001)}
    wide = {"type": "object", "properties": names, "required": list(names), "additionalProperties": False}
    assert "5,001 properties" in strict_notes(wide)[-1].text
    loose = {"type": "object", "properties": {f"p{n}": {"type": "object"} for n in range(500)}}
    assert len(strict_notes(loose)) == 100
    assert places(check_schema({"type": "string"}, strict=True).notes) == [("type", "#")]
