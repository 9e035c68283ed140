"""Decides whether an object's keys may come in any order or only in the schema's order.

With a fixed order, a model that writes a later property can no longer write an earlier optional property.
Therefore objects with optional properties allow any order, except small objects (Bounds.ordered). The grammar
engine's JSON Schema supports only a fixed order. Objects with any order are marked, and are later written in
Lark, which takes longer to compile.

If several schemas for a value add properties, each schema's properties form a group, and the order of the
groups is undetermined. For small objects, every order of the groups becomes an alternative.

The terms part, place, conjunction, constraint and shape are explained in constraints/json_types.py.
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

MAX_GROUPS = 3  # Maximum number of groups whose orders are listed.
MAX_NAMES = 48  # Maximum total number of names in an object's listed orders.
# Maximum number of named properties in an object whose keys may come in any order. The grammar engine cannot
# count more properties.
MAX_UNORDERED = 63
IN_ORDER = "keys only in the schema's order, other keys after them; set bounds.ordered to 0 for any order"
MAX_LISTED = 200  # Maximum length of the list of names in a note.
MARK = "x-any-order"  # Marks an object schema whose keys may come in any order.

Groups = list[tuple[str, ...]]


def describe_order(names: Iterable[str], why: str) -> str:
    """Return the text of the note on an object whose named properties come in a fixed order."""
    listed = ", ".join(names)
    listed = listed if len(listed) <= MAX_LISTED else f"{listed[: MAX_LISTED - 1]}…"
    return f"keys only in this order, other keys after them: {listed}; {why}"


def order_properties(shape: Shape, groups: Groups) -> Shape:
    """Return the shape with its object properties in the order of the groups.

    A name belongs to the first group that contains the name.
    """
    constraint = shape.get("object")
    if not isinstance(constraint, Object):
        return shape
    every = dict.fromkeys((*constraint.properties, *constraint.required))
    # Without `groups`, no schema orders the properties: the object is a constant, or only `required` names
    # the properties.
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
    """Return a constraint for each possible order of the constraint's groups. The schema's order is first."""
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
    """Decides which objects in a schema allow keys in any order, and collects notes on all objects with a
    fixed order.

    `ordered` is the setting Bounds.ordered. `bound` has notes on objects that have a fixed order only because
    of this setting. `narrow` has notes on objects that have a fixed order with any setting.
    """

    ordered: int
    bound: Notes = field(default_factory=Notes)
    narrow: Notes = field(default_factory=Notes)
    marked: list[Json] = field(default_factory=list)
    # (object schema with patterns, its JSON pointer).
    patterned: list[tuple[Json, str]] = field(default_factory=list)

    def is_unordered(self, constraint: Object, names: Sequence[str], is_open: bool, is_counted: bool) -> bool:
        """Return whether an object's keys may come in any order.

        `names` has the properties that may be present. `is_open` says whether other keys may be present.
        `is_counted` says whether minProperties or maxProperties leaves a choice between the properties.
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
        """Remove all marks if any-order objects cannot be written for this schema.

        In Lark, keys can come in any order only if each object's unnamed keys can be distinguished from its
        named keys.
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
