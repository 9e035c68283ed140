"""The order of keys: as the keywords that bring them stand in the schema, from left to right.

Where several schemas of one place bring different properties, which of them comes first is nothing that a
schema says. So other orders of these groups are taken too, as long as the grammar stays small.
"""

from dataclasses import replace
from itertools import permutations

from mmengine.structured_output.json_schema.pieces import Object, Shape

MAX_GROUPS = 3  # all orders of which are taken
MAX_NAMES = 48  # in all orders of one object together

Groups = list[tuple[str, ...]]


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
