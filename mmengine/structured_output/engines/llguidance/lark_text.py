"""Quotes texts as Lark strings."""

import json


def quoted(text: str) -> str:
    """Return a Lark string for the text. llguidance requires an escape for U+007F."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
