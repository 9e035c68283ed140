"""A normalized schema, and notes for clients on keywords without effect and on excluded values."""

from dataclasses import dataclass, field

import msgspec

from mmengine.structured_output.json_schema.vocabulary.refusal import format_pointer

MAX_NOTES = 100  # Maximum number of notes on a schema.


class Note(msgspec.Struct, frozen=True):
    """A remark on a keyword in a schema.

    `pointer`: a JSON pointer (RFC 6901; "#" is the root) to the first position with this remark. `count`: the
    number of positions. `warning`: whether the schema may differ from its author's intention.
    """

    keyword: str
    pointer: str
    text: str
    warning: bool = False
    count: int = 1


class NormalizedSchema(msgspec.Struct, frozen=True):
    """A normalized schema, which the grammar engine enforces exactly.

    `text`: the schema as JSON. `notes`: remarks on keywords without effect. `narrow`: remarks on subschemas
    for which `text` allows less than the original. `ordered`: remarks on objects whose key order comes only
    from the setting `Bounds.ordered` (emission/bounds.py).
    """

    text: str
    notes: tuple[Note, ...] = ()
    narrow: tuple[Note, ...] = ()
    ordered: tuple[Note, ...] = ()


@dataclass(slots=True)
class Notes:
    """Collects notes on a schema, and merges notes that differ only in their pointer."""

    # (keyword, text) -> first note.
    first: dict[tuple[str, str], Note] = field(default_factory=dict)
    counts: dict[tuple[str, str], int] = field(default_factory=dict)
    left_out: bool = False

    def add(self, keyword: str, pointer: str, text: str, warning: bool = False) -> None:
        """Add a note. `pointer` has no leading "#"."""
        key = keyword, text
        if key in self.first:
            self.counts[key] += 1
        elif len(self.first) < MAX_NOTES - 1:
            self.first[key] = Note(keyword, format_pointer(pointer), text, warning)
            self.counts[key] = 1
        else:
            self.left_out = True

    def all(self) -> tuple[Note, ...]:
        """Return at most MAX_NOTES notes. The last note reports omitted notes."""
        out = [msgspec.structs.replace(note, count=self.counts[key]) for key, note in self.first.items()]
        if self.left_out:
            out.append(Note("", "#", "more notes were omitted"))
        return tuple(out)
