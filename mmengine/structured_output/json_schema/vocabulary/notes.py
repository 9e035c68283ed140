"""Notes on a normalized schema: keywords that restrict nothing, and parts that are narrowed."""

from dataclasses import dataclass, field

import msgspec

from mmengine.structured_output.json_schema.vocabulary.refusal import format_pointer

MAX_NOTES = 100  # Maximum number of notes on one schema.


class Note(msgspec.Struct, frozen=True):
    """A remark on a schema's keyword.

    `pointer` is a JSON pointer (RFC 6901; "#" is the root) to the first position that the note is about.
    `count` says how many such positions there are. `warning` is True if the schema may not mean what its
    author intended.
    """

    keyword: str
    pointer: str
    text: str
    warning: bool = False
    count: int = 1


class NormalizedSchema(msgspec.Struct, frozen=True):
    """A schema in the form that the grammar engine enforces exactly.

    `text` is JSON. `notes` list keywords that restrict nothing; `narrow` lists parts for which the text
    allows less than the schema; `ordered` lists objects whose key order only `Bounds.ordered` fixes.
    """

    text: str
    notes: tuple[Note, ...] = ()
    narrow: tuple[Note, ...] = ()
    ordered: tuple[Note, ...] = ()


@dataclass(slots=True)
class Notes:
    """Collects the notes on a schema, and merges notes that differ only in their pointer."""

    # The first note for each keyword and text.
    first: dict[tuple[str, str], Note] = field(default_factory=dict)
    counts: dict[tuple[str, str], int] = field(default_factory=dict)
    left_out: bool = False

    def add(self, keyword: str, pointer: str, text: str, warning: bool = False) -> None:
        """Add a note; `pointer` has no leading "#"."""
        key = keyword, text
        if key in self.first:
            self.counts[key] += 1
        elif len(self.first) < MAX_NOTES - 1:
            self.first[key] = Note(keyword, format_pointer(pointer), text, warning)
            self.counts[key] = 1
        else:
            self.left_out = True

    def all(self) -> tuple[Note, ...]:
        """Return at most MAX_NOTES notes. The last note says when there are more."""
        out = [msgspec.structs.replace(note, count=self.counts[key]) for key, note in self.first.items()]
        if self.left_out:
            out.append(Note("", "#", "more notes were omitted"))
        return tuple(out)
