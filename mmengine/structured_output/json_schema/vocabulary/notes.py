"""What the gate says beside the schema: which keywords annotate only, though they look like assertions."""

from dataclasses import dataclass, field

import msgspec

from mmengine.structured_output.json_schema.vocabulary.refusal import shown_pointer

MAX_NOTES = 100  # of one schema


class Note(msgspec.Struct, frozen=True):
    """`pointer`: a JSON pointer (RFC 6901) to what the note speaks of, "#" for the root, the first of `count`
    places of which the same is to say. `warning`: that it may not be what was meant."""

    keyword: str
    pointer: str
    text: str
    warning: bool = False
    count: int = 1


class NormalizedSchema(msgspec.Struct, frozen=True):
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

    def all(self) -> tuple[Note, ...]:
        """MAX_NOTES at most, the last of which says that there are more."""
        out = [msgspec.structs.replace(note, count=self.counts[key]) for key, note in self.first.items()]
        if self.left_out:
            out.append(Note("", "#", "there are more notes than are listed"))
        return tuple(out)
