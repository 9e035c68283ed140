"""Writes texts as Lark strings."""

import json


def quoted(text: str) -> str:
    """Return a Lark string for the text. llguidance's Lark reads U+007F only as an escape."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
