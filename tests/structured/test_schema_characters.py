"""Test that character sets in patterns match exactly the characters that they name, also in the grammar
engine.
"""

import json

import pytest

from mmengine.structured_output.json_schema.normalization import SchemaRefused
from tests.structured.accepting import Grammar


@pytest.mark.parametrize(
    ("pattern", "accepted", "refused"),
    [
        ('^[^"]$', "a\\é\x01\n", '"'),
        ("^[^\\\\]$", 'a"é\x01', "\\"),
        ('^[^\\p{L}"]$', "1\\\x01", 'a"é'),
        ("^[\\p{L}\\x00-\\x1f]$", "aé\x01\n", '"\\1'),
        ('^([^"\\x00-\\x08]|\\x00)$', "a\\\x00\x0e", '"\x01'),
        ('^(\\x00|["a])$', '\x00"a', "\\\x01b"),
    ],
)
def test_character_sets_contain_their_characters(pattern: str, accepted: str, refused: str) -> None:
    """Some control characters have no short escape such as \\n. If a set contains all these characters,
    llguidance wrongly adds the quote and the backslash. So mmengine writes such a set without U+0000.
    """
    grammar = Grammar({"type": "string", "pattern": pattern})
    assert [char for char in accepted if not grammar.accepts(json.dumps(char, ensure_ascii=False))] == []
    assert [char for char in refused if grammar.accepts(json.dumps(char, ensure_ascii=False))] == []


NAME = {"type": "object", "patternProperties": {"^[^/\\\\]*$": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "accepted", "refused"),
    [
        ({**NAME, "properties": {"\0": {}}}, [{"\0": 1, "a": 1}, {"/": ""}], [{"\0": ""}, {"a": ""}]),
        ({**NAME, "additionalProperties": {"type": "string"}}, [{"a": 1}, {"/": ""}], [{"\0": ""}, {"/": 1}]),
        (NAME, [{"a": 1}, {"/": ""}], [{"\0": ""}, {"a\0": ""}]),
        (
            {
                "type": "object",
                "patternProperties": {'^[^"]$': {"type": "integer"}, "^[\\x00b]$": {"minimum": 3}},
            },
            [{"b": 4}, {"a": 1}, {'"': ""}],
            [{"\0": 1}, {"b": 1}, {"\0": ""}],
        ),
        ({"enum": ["\0", "a", '"'], "not": {"pattern": '^[^"]$'}}, ['"'], ["\0", "a"]),
        ({"enum": ["\0", "a", '"'], "pattern": '^[^"]$'}, ["\0", "a"], ['"']),
        ({"enum": ["\0", "a", '"'], "pattern": '^[^\\x00"]$'}, ["a"], ['"', "\0"]),
        ({"enum": ["\0", "a", '"'], "not": {"pattern": '^[^\\x00"]$'}}, ['"', "\0"], ["a"]),
    ],
)
def test_a_set_written_without_nul_still_stands_for_nul(schema: dict, accepted: list, refused: list) -> None:
    # mmengine compares such a set with keys and enum values as if the set still contained U+0000.
    grammar = Grammar(schema)
    assert [each for each in accepted if not grammar.accepts(json.dumps(each, ensure_ascii=False))] == []
    assert [each for each in refused if grammar.accepts(json.dumps(each, ensure_ascii=False))] == []


def test_a_key_pattern_with_a_category_but_without_nul_is_refused() -> None:
    with pytest.raises(SchemaRefused, match="U\\+0000") as caught:
        Grammar({"type": "object", "patternProperties": {'^[^\\p{L}"]$': {"type": "integer"}}})
    assert caught.value.pointer == "#/patternProperties"
