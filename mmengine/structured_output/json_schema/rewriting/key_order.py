"""Decide whether an object's keys may come in any order, or only in the schema's order.

In a fixed order, an optional property can no longer follow once a later property has started. Objects with
optional properties therefore allow any order, unless they are small (Bounds.ordered). The grammar engine's
JSON Schema supports only a fixed order. An object that is marked for any order is written in Lark, which
takes longer to compile.

If several schemas for the same value add properties, no schema says which properties come first. For small
objects, each order in which the schemas' key groups can come becomes an alternative.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import permutations

from msgspec.structs import replace

from mmengine.structured_output.json_schema.constraints.json_types import Object, Shape
from mmengine.structured_output.json_schema.patterns.character_sets import PatternError
from mmengine.structured_output.json_schema.patterns.matching import MatchBudget
from mmengine.structured_output.json_schema.patterns.other_keys import Json, expand_other_keys
from mmengine.structured_output.json_schema.rewriting.key_patterns import unnamed_keys
from mmengine.structured_output.json_schema.vocabulary.notes import Notes

MAX_GROUPS = 3  # Maximum number of groups; all their orders become alternatives.
MAX_NAMES = 48  # Maximum number of names in all orders of one object together.
# Maximum number of named properties of an object with any order: the grammar engine counts no more.
MAX_UNORDERED = 63
IN_ORDER = "keys only in the schema's order, other keys after them; set bounds.ordered to 0 for any order"
MAX_LISTED = 200  # Maximum number of characters for the names in a note.
MARK = "x-any-order"  # True in an object whose keys may come in any order.

Groups = list[tuple[str, ...]]


def describe_order(names: Iterable[str], why: str) -> str:
    """Return the note on an object whose named properties come in a fixed order."""
    listed = ", ".join(names)
    listed = listed if len(listed) <= MAX_LISTED else f"{listed[: MAX_LISTED - 1]}…"
    return f"keys only in this order, other keys after them: {listed}; {why}"


def order_properties(shape: Shape, groups: Groups) -> Shape:
    """Return the shape with its properties in the groups' order. A name belongs to the first group that
    contains it.
    """
    constraint = shape.get("object")
    if not isinstance(constraint, Object):
        return shape
    every = dict.fromkeys((*constraint.properties, *constraint.required))
    # No schema orders the properties: the object is a constant, or `required` alone names them.
    if not groups and len(every) <= MAX_GROUPS:
        groups = [(name,) for name in every]
    seen: set[str] = set()
    left: Groups = []
    for names in groups:
        new = tuple(name for name in dict.fromkeys(names) if name not in seen)
        seen.update(new)
        left += [new] if new else []
    known = {
        name: constraint.properties[name] for names in left for name in names if name in constraint.properties
    }
    return {
        **shape,
        "object": replace(constraint, properties=known | constraint.properties, groups=tuple(left)),
    }


def list_orders(constraint: Object) -> list[Object]:
    """Return the constraint once for each order that its groups can have. The first is in the documented
    order.
    """
    count = len(constraint.groups)
    if not 1 < count <= MAX_GROUPS:
        return [constraint]
    orders = list(permutations(constraint.groups))
    if len(orders) * len({*constraint.properties, *constraint.required}) > MAX_NAMES:
        return [constraint]
    out = []
    for groups in orders:
        names = [name for group in groups for name in group]
        properties = {name: constraint.properties[name] for name in names if name in constraint.properties}
        required = dict.fromkeys(
            (*(name for name in names if name in constraint.required), *constraint.required)
        )
        out.append(
            replace(constraint, properties=properties | constraint.properties, required=tuple(required))
        )
    return out


@dataclass(slots=True)
class KeyOrders:
    """Decides which objects in a schema allow keys in any order, and collects notes on the other objects.

    `ordered` is as in Bounds. `bound` holds notes on orders that only this bound excludes; `narrow` holds
    notes on orders that no setting allows.
    """

    ordered: int
    bound: Notes = field(default_factory=Notes)
    narrow: Notes = field(default_factory=Notes)
    marked: list[Json] = field(default_factory=list)
    # Objects with patterns, and their pointers.
    patterned: list[tuple[Json, str]] = field(default_factory=list)

    def is_unordered(self, constraint: Object, names: Sequence[str], is_open: bool, is_counted: bool) -> bool:
        """Return whether an object's keys may come in any order.

        `names` are the properties that may be present. `is_open` says whether other keys may be present.
        `is_counted` says whether minProperties or maxProperties leave a choice between the properties.
        """
        if is_counted or len(names) > MAX_UNORDERED or len(names) + is_open < 2:
            return False
        if not self.ordered:
            return True
        if len(names) <= self.ordered:
            return False
        has_order = len(constraint.groups) <= 1 or len(list_orders(constraint)) > 1
        return not (has_order and set(names) <= set(constraint.required))

    def add_note(
        self, constraint: Object, names: Collection[str], is_open: bool, is_counted: bool, pointer: str
    ) -> None:
        """Add a note on an object whose keys come in a fixed order."""
        if len(names) + is_open < 2:
            return
        if len(names) > MAX_UNORDERED:
            self.narrow.add(
                "properties", pointer, describe_order(names, f"there are more than {MAX_UNORDERED}")
            )
        elif is_counted:
            why = "minProperties and maxProperties count them"
            self.narrow.add("properties", pointer, describe_order(names, why))
        elif is_open or len(list_orders(constraint)) == 1 or len(constraint.groups) < len(names):
            self.bound.add("properties", pointer, IN_ORDER)

    def drop_unsupported(self) -> None:
        """Remove all marks if some object's unnamed keys cannot be distinguished from its named keys, which
        unordered objects require.
        """
        for schema, pointer in self.patterned:
            if not self.marked:
                return
            try:
                unnamed_keys(expand_other_keys(schema, spelled_out=False), MatchBudget())
            except PatternError as error:
                why = f"keys only in the schema's order, here and in all objects: {error}"
                self.narrow.add("patternProperties", pointer, why)
                for each in self.marked:
                    del each[MARK]
                self.marked.clear()
