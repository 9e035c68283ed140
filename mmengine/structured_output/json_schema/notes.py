"""What the gate says beside the schema: which keywords annotate only, though they look like assertions."""

from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache
from typing import NoReturn

import msgspec

from mmengine.structured_output.json_schema.dialects import ALL, KNOWN_IN, NAMES
from mmengine.structured_output.json_schema.drafts import Translated
from mmengine.structured_output.json_schema.refusal import refuse, shown_pointer, step

MAX_NOTES = 100  # of one schema
MAX_KEYWORD = 40  # characters of a keyword that may be a misspelt one


class Note(msgspec.Struct, frozen=True):
    """`pointer`: a JSON pointer (RFC 6901) to what the note speaks of, "#" for the root, the first of `count`
    places of which the same is to say. `warning`: that it may not be what was meant."""

    keyword: str
    pointer: str
    text: str
    warning: bool = False
    count: int = 1


class Gated(msgspec.Struct, frozen=True):
    """What the gate makes of a schema: JSON text for the grammar engine, what to know about it, where it
    allows less than the schema, and where Bounds alone keep keys in order."""

    text: str
    notes: tuple[Note, ...] = ()
    narrow: tuple[Note, ...] = ()
    ordered: tuple[Note, ...] = ()


@dataclass(slots=True)
class Notes:
    """The notes of one schema. The same about many places is one."""

    first: dict[tuple[str, str], Note] = field(default_factory=dict)  # by keyword and text
    counts: dict[tuple[str, str], int] = field(default_factory=dict)
    left_out: bool = False

    def say(self, keyword: str, pointer: str, text: str, warning: bool = False) -> None:
        """`pointer` is without its #."""
        key = keyword, text
        if key in self.first:
            self.counts[key] += 1
        elif len(self.first) < MAX_NOTES - 1:
            self.first[key] = Note(keyword, shown_pointer(pointer), text, warning)
            self.counts[key] = 1
        else:
            self.left_out = True

    def add(self, made: Translated, pointer: str, draft: int) -> None:
        """What is to say of one schema object, and of the keywords that it has not in its draft."""
        for keyword in made.unknown:
            if not self.left_out:
                text, warning = of_unknown(keyword[: MAX_KEYWORD + 1], draft)
                self.say(shortened(keyword), step(pointer, shortened(keyword)), text, warning)
        for keyword, text in made.remarks:
            self.say(keyword, step(pointer, keyword), text, warning=keyword == "$ref")

    def all(self) -> tuple[Note, ...]:
        """MAX_NOTES at most, the last of which says that there are more."""
        out = [msgspec.structs.replace(note, count=self.counts[key]) for key, note in self.first.items()]
        if self.left_out:
            out.append(Note("", "#", "there are more notes than are listed"))
        return tuple(out)


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
