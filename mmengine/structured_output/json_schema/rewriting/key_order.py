"""The order of keys: any, or as the keywords that bring them stand in the schema, from left to right.

A property that may be left out can never come any more once one behind it has begun. So objects that have
such properties take any order, unless they are small (Bounds.ordered): the grammar engine's JSON Schema has
one order, and an object that is marked for more is written in another form, which takes longer to compile.

Where several schemas of one place bring different properties, which of them comes first is nothing that a
schema says. So in small objects other orders of these groups are taken too, as alternatives.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import permutations

from msgspec.structs import replace

from mmengine.structured_output.json_schema.constraints.json_types import Object, Shape
from mmengine.structured_output.json_schema.patterns.character_sets import PatternError
from mmengine.structured_output.json_schema.patterns.matching import Budget
from mmengine.structured_output.json_schema.patterns.other_keys import Json, by_patterns
from mmengine.structured_output.json_schema.rewriting.key_patterns import unnamed_keys
from mmengine.structured_output.json_schema.vocabulary.notes import Notes

MAX_GROUPS = 3  # all orders of which are taken as alternatives
MAX_NAMES = 48  # in all orders of one object together
MAX_ANY = 63  # named properties of an object that come in any order: the grammar engine counts so far
IN_ORDER = "keys in the schema's order only, others behind them; bounds.ordered 0 takes any order"
MAX_LISTED = 200  # characters of names in a note
MARK = "x-any-order"  # true in an object whose keys may come in any order

Groups = list[tuple[str, ...]]


def in_one_order(names: Iterable[str], why: str) -> str:
    """What a note says of an object whose named properties come in no other order."""
    listed = ", ".join(names)
    listed = listed if len(listed) <= MAX_LISTED else f"{listed[: MAX_LISTED - 1]}…"
    return f"keys in this order only, others behind them: {listed}; {why}"


def arranged(shape: Shape, groups: Groups) -> Shape:
    """The shape with its properties in the order of the groups, whose first mention of a name counts."""
    piece = shape.get("object")
    if not isinstance(piece, Object):
        return shape
    every = dict.fromkeys((*piece.properties, *piece.required))
    if not groups and len(every) <= MAX_GROUPS:  # of a constant, or only required
        groups = [(name,) for name in every]
    seen: set[str] = set()
    left: Groups = []
    for names in groups:
        new = tuple(name for name in dict.fromkeys(names) if name not in seen)
        seen.update(new)
        left += [new] if new else []
    known = {name: piece.properties[name] for names in left for name in names if name in piece.properties}
    return {**shape, "object": replace(piece, properties=known | piece.properties, groups=tuple(left))}


def arrangements(piece: Object) -> list[Object]:
    """The piece once for each order of its groups; the documented order is the first."""
    count = len(piece.groups)
    if not 1 < count <= MAX_GROUPS:
        return [piece]
    orders = list(permutations(piece.groups))
    if len(orders) * len({*piece.properties, *piece.required}) > MAX_NAMES:
        return [piece]
    out = []
    for groups in orders:
        names = [name for group in groups for name in group]
        properties = {name: piece.properties[name] for name in names if name in piece.properties}
        required = dict.fromkeys((*(name for name in names if name in piece.required), *piece.required))
        out.append(replace(piece, properties=properties | piece.properties, required=tuple(required)))
    return out


@dataclass(slots=True)
class Orders:
    """Which objects of one schema take their keys in any order, and what is to say of the others.

    `ordered`: as in Bounds. `bound`: what only it leaves out; `narrow`: what no setting brings.
    """

    ordered: int
    bound: Notes = field(default_factory=Notes)
    narrow: Notes = field(default_factory=Notes)
    marked: list[Json] = field(default_factory=list)
    patterned: list[tuple[Json, str]] = field(default_factory=list)  # objects with patterns, their pointers

    def any(self, piece: Object, names: Sequence[str], is_open: bool, is_counted: bool) -> bool:
        """`names`: the properties that may be there; `is_open`: other keys may too; `is_counted`:
        minProperties or maxProperties leave a choice of them."""
        if is_counted or len(names) > MAX_ANY or len(names) + is_open < 2:
            return False
        if not self.ordered:
            return True
        if len(names) <= self.ordered:
            return False
        has_order = len(piece.groups) <= 1 or len(arrangements(piece)) > 1
        return not (has_order and set(names) <= set(piece.required))

    def say(
        self, piece: Object, names: Collection[str], is_open: bool, is_counted: bool, pointer: str
    ) -> None:
        """Of an object in one order."""
        if len(names) + is_open < 2:
            return
        if len(names) > MAX_ANY:
            self.narrow.say("properties", pointer, in_one_order(names, f"they are more than {MAX_ANY}"))
        elif is_counted:
            why = "minProperties and maxProperties count them"
            self.narrow.say("properties", pointer, in_one_order(names, why))
        elif is_open or len(arrangements(piece)) == 1 or len(piece.groups) < len(names):
            self.bound.say("properties", pointer, IN_ORDER)

    def settle(self) -> None:
        """Takes all marks back where keys cannot be told apart by what writes objects of any order."""
        for schema, pointer in self.patterned:
            if not self.marked:
                return
            try:
                unnamed_keys(by_patterns(schema, spelled_out=False), Budget())
            except PatternError as error:
                why = f"keys in the schema's order only, here and in all objects: {error}"
                self.narrow.say("patternProperties", pointer, why)
                for each in self.marked:
                    del each[MARK]
                self.marked.clear()
