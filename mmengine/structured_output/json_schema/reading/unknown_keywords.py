"""Writes notes on keywords that a draft does not define, or refuses them with strict_keywords."""

from difflib import get_close_matches
from functools import lru_cache
from typing import NoReturn

from mmengine.structured_output.json_pointer import join_pointer
from mmengine.structured_output.json_schema.reading.translation import TranslatedSchema
from mmengine.structured_output.json_schema.vocabulary.dialects import ALL_KEYWORDS, KNOWN_IN, NAMES
from mmengine.structured_output.json_schema.vocabulary.notes import Notes
from mmengine.structured_output.json_schema.vocabulary.refusal import refuse

# Maximum length of a keyword that is checked for a spelling mistake.
MAX_KEYWORD = 40


def add_notes(notes: Notes, made: TranslatedSchema, pointer: str, draft: int) -> None:
    """Add notes on a schema object's unknown keywords, and the remarks from its translation."""
    for keyword in made.unknown:
        if not notes.left_out:
            text, warning = describe_unknown(keyword[: MAX_KEYWORD + 1], draft)
            notes.add(
                shorten_keyword(keyword), join_pointer(pointer, shorten_keyword(keyword)), text, warning
            )
    for keyword, text in made.remarks:
        notes.add(keyword, join_pointer(pointer, keyword), text, warning=keyword == "$ref")


def shorten_keyword(keyword: str) -> str:
    return keyword if len(keyword) <= 200 else keyword[:199] + "…"


@lru_cache(maxsize=1024)
def describe_unknown(keyword: str, draft: int) -> tuple[str, bool]:
    """Return (note, whether it is a warning) for a keyword that the draft does not define."""
    known = KNOWN_IN[draft]
    if keyword in ALL_KEYWORDS:
        return f"not a keyword of {NAMES[draft]}, so it restricts nothing", True
    if keyword.startswith(("x-", "$", "_")) or len(keyword) > MAX_KEYWORD:
        return "unknown keyword: treated as an annotation, it restricts nothing", False
    meant = [name for name in sorted(known) if name.lower() == keyword.lower()]
    meant = meant or get_close_matches(keyword, sorted(known), 1, 0.8)
    if meant:
        return f"unknown keyword: it restricts nothing; did you mean {meant[0]}?", True
    return "unknown keyword: treated as an annotation, it restricts nothing", False


def refuse_unknown(keyword: str, draft: int, pointer: str) -> NoReturn:
    text, _ = describe_unknown(keyword[: MAX_KEYWORD + 1], draft)
    refuse(
        shorten_keyword(keyword),
        join_pointer(pointer, shorten_keyword(keyword)),
        f"{text} (refused by strict_keywords)",
    )
