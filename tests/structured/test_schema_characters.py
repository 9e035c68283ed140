"""Sets of characters in patterns, against what they say."""

import json

import pytest

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
def test_sets_of_characters_hold_what_they_say(pattern: str, accepted: str, refused: str) -> None:
    """The quote and the backslash among them, which the grammar engine adds to some sets that hold U+0000."""
    grammar = Grammar({"type": "string", "pattern": pattern})
    assert [char for char in accepted if not grammar.accepts(json.dumps(char, ensure_ascii=False))] == []
    assert [char for char in refused if grammar.accepts(json.dumps(char, ensure_ascii=False))] == []
