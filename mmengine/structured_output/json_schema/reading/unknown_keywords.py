"""Keywords that a draft does not define: the notes on them, and their refusal by strict_keywords."""

from difflib import get_close_matches
from functools import lru_cache
from typing import NoReturn

from mmengine.structured_output.json_schema.reading.translation import Translated
from mmengine.structured_output.json_schema.vocabulary.dialects import ALL, KNOWN_IN, NAMES
from mmengine.structured_output.json_schema.vocabulary.notes import Notes
from mmengine.structured_output.json_schema.vocabulary.refusal import refuse, step

MAX_KEYWORD = 40  # characters of a keyword that may be a misspelt one


def add_notes(notes: Notes, made: Translated, pointer: str, draft: int) -> None:
    """Note what is to say of one schema object, and of the keywords that it has not in its draft."""
    for keyword in made.unknown:
        if not notes.left_out:
            text, warning = of_unknown(keyword[: MAX_KEYWORD + 1], draft)
            notes.say(shortened(keyword), step(pointer, shortened(keyword)), text, warning)
    for keyword, text in made.remarks:
        notes.say(keyword, step(pointer, keyword), text, warning=keyword == "$ref")


def shortened(keyword: str) -> str:
    return keyword if len(keyword) <= 200 else keyword[:199] + "…"


@lru_cache(maxsize=1024)
def of_unknown(keyword: str, draft: int) -> tuple[str, bool]:
    """What to say of a keyword that its draft does not have, and whether that is a warning."""
    known = KNOWN_IN[draft]
    if keyword in ALL:
        return f"it is no keyword of {NAMES[draft]} and restricts nothing", True
    if keyword.startswith(("x-", "$", "_")) or len(keyword) > MAX_KEYWORD:
        return "unknown, so it is an annotation and restricts nothing", False
    meant = [name for name in sorted(known) if name.lower() == keyword.lower()]
    meant = meant or get_close_matches(keyword, sorted(known), 1, 0.8)
    if meant:
        return f"unknown, so it restricts nothing; was {meant[0]} meant?", True
    return "unknown, so it is an annotation and restricts nothing", False


def refuse_unknown(keyword: str, draft: int, pointer: str) -> NoReturn:
    text, _ = of_unknown(keyword[: MAX_KEYWORD + 1], draft)
    refuse(shortened(keyword), step(pointer, shortened(keyword)), f"{text} (strict_keywords refuses it)")
