"""What the gate takes as an annotation, and says so."""

import pytest

from mmengine.structured_output.json_schema.gate import gate
from mmengine.structured_output.json_schema.notes import MAX_NOTES
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
    notes = gate(schema).notes
    assert {(note.keyword, note.pointer) for note in notes} == {
        ("version", "#/version"),
        ("format", "#/properties/a~1b/format"),
        ("x-order", "#/properties/a~1b/x-order"),
    }
    grammar = Grammar(schema)
    assert grammar.accepts('{"a/b":"anything"}') and not grammar.accepts('{"a/b":1}')
    assert grammar.accepts('{"c":"2024-02-29"}') and not grammar.accepts('{"c":"anything"}')


def test_notes_are_bounded() -> None:
    notes = gate({f"x-{at}": at for at in range(10_000)}).notes
    assert len(notes) == MAX_NOTES and "more" in notes[-1].text
