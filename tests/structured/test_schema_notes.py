"""Test the notes on keywords that are treated as annotations, and on limits that are narrowed."""

import json

import pytest

from mmengine.errors import InvalidRequest
from mmengine.structured_output.json_schema.normalization import Bounds, SchemaRefused, normalize_schema
from mmengine.structured_output.json_schema.vocabulary.notes import MAX_NOTES
from mmengine.structured_output.request.spec import grammar_of, notes_of
from tests.structured.accepting import Grammar


@pytest.mark.parametrize(
    "uri",
    [
        *(f"http://json-schema.org/draft-0{at}/schema#" for at in (4, 6, 7)),
        "https://json-schema.org/draft/2019-09/schema",
        "https://json-schema.org/draft/2020-12/schema",
        "https://example.org/our-own",
    ],
)
def test_any_draft_is_taken(uri: str) -> None:
    grammar = Grammar({"$schema": uri, "type": "integer", "minimum": 3})
    assert grammar.accepts("3") and not grammar.accepts("2") and not grammar.accepts('"x"')


def test_unknown_keywords_and_formats_are_annotations_and_noted() -> None:
    schema = {
        "properties": {
            "a/b": {"type": "string", "format": "phone", "x-order": [{"not": "a schema"}]},
            "c": {"type": "string", "format": "date"},
        },
        "version": {"$ref": "nowhere"},
    }
    notes = normalize_schema(schema).notes
    assert {(note.keyword, note.pointer) for note in notes} == {
        ("version", "#/version"),
        ("format", "#/properties/a~1b/format"),
        ("x-order", "#/properties/a~1b/x-order"),
    }
    grammar = Grammar(schema)
    assert grammar.accepts('{"a/b":"anything"}') and not grammar.accepts('{"a/b":1}')
    assert grammar.accepts('{"c":"2024-02-29"}') and not grammar.accepts('{"c":"anything"}')


def test_notes_are_bounded() -> None:
    notes = normalize_schema({f"x-{at}": at for at in range(10_000)}).notes
    assert len(notes) == MAX_NOTES and "more" in notes[-1].text


def test_a_misspelt_keyword_is_a_warning() -> None:
    schema = {
        "maxlength": 3,
        "requried": ["a"],
        "x-max": 3,
        "title": "t",
        "colour": 1,
        "items": {"maxlength": 1},
    }
    found = {note.keyword: note for note in normalize_schema(schema).notes}
    assert {name for name, note in found.items() if note.warning} == {"maxlength", "requried"}
    assert "maxLength" in found["maxlength"].text and "required" in found["requried"].text
    assert (found["maxlength"].pointer, found["maxlength"].count) == ("#/maxlength", 2)
    assert set(found) == {"maxlength", "requried", "x-max", "colour"}


def test_a_keyword_of_another_draft_is_a_warning() -> None:
    schema = {"$schema": "http://json-schema.org/draft-04/schema#", "const": 3, "$ref": "#/definitions/a"}
    notes = normalize_schema({**schema, "definitions": {"a": {}}, "minimum": 3}).notes
    assert [(note.keyword, note.warning) for note in notes] == [("const", True), ("$ref", True)]
    assert "draft-04" in notes[0].text and "minimum" in notes[1].text


def test_strict_keywords_refuses_unknown_keywords() -> None:
    assert (
        normalize_schema(
            {"title": "t", "properties": {"version": {}}, "$id": "x"}, strict_keywords=True
        ).notes
        == ()
    )
    for schema, keyword, pointer in (
        ({"properties": {"a": {"maxlength": 3}}}, "maxlength", "#/properties/a/maxlength"),
        ({"$defs": {"a": {"x-b": 3}}}, "x-b", "#/$defs/a/x-b"),
    ):
        with pytest.raises(SchemaRefused) as caught:
            normalize_schema(schema, strict_keywords=True)
        assert (caught.value.keyword, caught.value.pointer) == (keyword, pointer)


def test_a_response_format_carries_them() -> None:
    # A response format accepts `schemas` and `strict_keywords`. `notes_of` returns the notes on its schemas.
    asked = {"type": "json_schema", "json_schema": {"schema": {"$ref": "http://example.org/a"}}}
    schemas = {"http://example.org/a": {"type": "integer", "maximun": 2**63}}
    with pytest.raises(InvalidRequest, match="outside this schema"):
        grammar_of(asked)
    grammar = grammar_of({**asked, "schemas": schemas})
    assert grammar is not None and '"integer"' in grammar.source
    notes = notes_of({**asked, "schemas": schemas, "on_truncation": "close"})
    assert [(note.keyword, note.pointer) for note in notes] == [("maximun", "http://example.org/a#/maximun")]
    assert notes_of({"type": "text"}) == notes_of({"type": "json_object"}) == notes_of(None) == ()
    for wrong in ({"schemas": []}, {"strict_keywords": 1}, {"schemas": {"http://[x": {"$ref": "y"}}}):
        with pytest.raises(InvalidRequest):
            grammar_of({**asked, **wrong})
    with pytest.raises(InvalidRequest, match="maximun"):
        grammar_of({**asked, "schemas": schemas, "strict_keywords": True})


N = 2**63 - 1
NUMBERS = [
    # schema, accepted instances, refused instances (without bounds), whether a note reports a narrowed schema
    ({"type": "integer", "maximum": N}, [5, N], [N + 1], False),
    ({"type": "integer", "minimum": -N - 1, "maximum": N}, [-N + 1023, N], [-N - 2, N + 1], True),
    ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, [0, N], [-1, 2**64], True),
    ({"type": "integer", "maximum": 10**16}, [10**16], [10**16 + 1], False),
    ({"type": "integer", "exclusiveMinimum": -(10**16)}, [-(10**16) + 2], [-(10**16)], True),
    ({"type": "integer", "minimum": 2**59}, [2**59, 2**61], [2**59 - 1], False),
    ({"type": "number", "maximum": 10**17}, [1, 10**17, 1.5], [10**17 + 1], False),
    ({"type": "number", "exclusiveMaximum": 2**60}, [1.5, 2**60 - 176], [2**60, 2**60 + 1], True),
    ({"type": "number", "minimum": -1e300, "maximum": 1e308}, [1.5, -(10**18)], [], True),
    ({"enum": [10**20, 2**53 + 2]}, [10**20, 2**53 + 2], [10**20 + 1, 2**53], False),
    ({"type": "integer", "multipleOf": 75.0}, [150], [76], False),
    ({"type": "string", "maxLength": 2**31 - 1}, ["x"], [1], False),
    ({"type": "array", "maxItems": 10**12}, [[1]], [1], False),
]


@pytest.mark.parametrize(("schema", "accepted", "refused", "narrower"), NUMBERS)
def test_numbers_beyond_floats(schema: dict, accepted: list, refused: list, narrower: bool) -> None:
    grammar = Grammar(schema)
    assert [value for value in accepted if not grammar.accepts(json.dumps(value))] == [], grammar.text
    assert [value for value in refused if grammar.accepts(json.dumps(value))] == [], grammar.text
    assert (
        any("enforced as" in note.text for note in normalize_schema(schema, Bounds.off()).narrow) == narrower
    )
    assert Grammar(schema, Bounds())


def test_a_bound_beyond_17_digits_is_exact() -> None:
    """With at most 17 digits, no number reaches these limits, so the limits are not narrowed."""
    schema = {"type": "integer", "minimum": -(2**63), "maximum": 2**64}
    assert normalize_schema(schema, Bounds(digits=17)).narrow == () != normalize_schema(schema).narrow


CONTRADICTING = [
    # (schema, accepted texts, refused texts). A contradiction excludes only values that need the
    # contradicting part.
    ({"anyOf": [{"type": "string", "minLength": 5, "maxLength": 3}, {"type": "null"}]}, ["null"], ['"abcd"']),
    ({"minimum": 3, "maximum": 2, "type": ["number", "null"]}, ["null"], ["2", "3"]),
    (
        {"type": "object", "properties": {"a": {"enum": []}, "b": {"const": 1}}},
        ["{}", '{"b":1}'],
        ['{"a":1}'],
    ),
    ({"type": "array", "items": {"type": "array", "minItems": 2, "maxItems": 1}}, ["[]"], ["[[]]", "[[1]]"]),
    ({"required": ["a"], "properties": {"a": False}}, ["null", "[]"], ['{"a":1}', "{}"]),
]


@pytest.mark.parametrize(("schema", "accepted", "refused"), CONTRADICTING)
def test_a_contradiction_in_one_branch_is_no_refusal(
    schema: dict, accepted: list[str], refused: list[str]
) -> None:
    grammar = Grammar(schema)
    assert [text for text in accepted if not grammar.accepts(text)] == [], grammar.text
    assert [text for text in refused if grammar.accepts(text)] == [], grammar.text
