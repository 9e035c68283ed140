"""Writes array constraints as schemas for the grammar engine.

The grammar engine does not support `contains` and `uniqueItems`. An array with these keywords is written as
an automaton under the key `x-steps` or `x-distinct`. json_schema_lark.py translates these keys. The grammar
engine refuses an untranslated automaton, because the array's schema also has `uniqueItems`. If an automaton
has few paths, each path becomes an alternative array instead.

The terms part, place, conjunction, constraint and shape are explained in constraints/json_types.py.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Literal

from mmengine.structured_output.json_pointer import join_pointer
from mmengine.structured_output.json_schema.constraints.item_automata import ItemAutomaton
from mmengine.structured_output.json_schema.constraints.json_types import Array, Conjunction
from mmengine.structured_output.json_schema.rewriting.satisfiability import Satisfiable
from mmengine.structured_output.json_schema.vocabulary.refusal import refuse

Json = dict[str, object]
Part = Callable[[Conjunction], Json | Literal[True]]
MAX_ITEMS = 4_096  # Maximum value of minItems.
MAX_PATHS = 16  # Maximum number of paths, and of items on a path, if each path is written as an array.


def array_schemas(constraint: Array, conj: Conjunction, satisfiable: Satisfiable, part: Part) -> list[Json]:
    """Return alternative schemas for an array. `part` writes an item's schema."""
    if not constraint.counts_together():
        return [_array(constraint, conj, satisfiable, part)]
    found = satisfiable.sequences[constraint].restrict_to(satisfiable.satisfied)
    assert found is not None  # The caller skips constraints that no array satisfies.
    if not isinstance(found, ItemAutomaton):
        distinct: Json = {
            "values": [part(value) for value in found.values],
            "minItems": found.low,
            "maxItems": found.high,
            "matching": found.matching,
            "minContains": found.least,
            "maxContains": found.most,
        }
        return [{"type": "array", "uniqueItems": True, "x-distinct": distinct}]
    ways = _list_paths(found)
    if ways is not None:
        return [_tuple([part(one) for one in way]) for way in ways]
    edges = [[start, to, part(one)] for start, to, one in found.edges]
    steps: Json = {"edges": edges, "ends": sorted(found.ends)}
    return [{"type": "array", "uniqueItems": True, "x-steps": steps}]


def _array(constraint: Array, conj: Conjunction, satisfiable: Satisfiable, part: Part) -> Json:
    yes = satisfiable.satisfied
    pointer = satisfiable.shapes.pointer(conj)
    high = constraint.high
    for at, one in enumerate(constraint.prefix):
        if one not in yes:
            high = at if high is None else min(high, at)
            break
    if constraint.rest not in yes and (high is None or high > len(constraint.prefix)):
        high = len(constraint.prefix)
    if constraint.low > MAX_ITEMS:
        refuse(
            "minItems", join_pointer(pointer, "minItems"), f"more than {MAX_ITEMS:,} items cannot be counted"
        )
    out: Json = {"type": "array"}
    prefix = constraint.prefix if high is None else constraint.prefix[:high]
    if prefix:
        out["prefixItems"] = [part(one) for one in prefix]
    out["items"] = part(constraint.rest) if constraint.rest in yes else False
    if constraint.low:
        out["minItems"] = constraint.low
    if high is not None:
        out["maxItems"] = high
    return out


def _tuple(items: list[Json | Literal[True]]) -> Json:
    out: Json = {"type": "array", "items": False}
    if items:
        out["prefixItems"] = items
        out["minItems"] = len(items)
    return {**out, "maxItems": len(items)}


def _list_paths(steps: ItemAutomaton) -> list[list[Conjunction]] | None:
    """Return the items on every path from the start state to an end, or None for too many paths."""
    after = defaultdict(list)
    for start, to, one in steps.edges:
        after[start].append((to, one))
    out: list[list[Conjunction]] = []
    waiting: list[tuple[int, list[Conjunction]]] = [(0, [])]
    while waiting:
        state, way = waiting.pop(0)
        if state in steps.ends:
            out.append(way)
        if len(out) > MAX_PATHS or len(way) > MAX_PATHS or len(waiting) > MAX_PATHS:
            return None
        waiting += [(to, [*way, one]) for to, one in after[state]]
    return out
