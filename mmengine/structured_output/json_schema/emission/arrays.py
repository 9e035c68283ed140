"""Arrays, written for the grammar engine.

What the grammar engine's JSON Schema cannot say of items together is written as an automaton under `x-steps`
or `x-distinct`, which json_schema_lark.py reads; beside it stands `uniqueItems`, for which the grammar engine
refuses the schema as it is.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Literal

from mmengine.structured_output.json_schema.constraints.item_automata import Steps
from mmengine.structured_output.json_schema.constraints.json_types import Array, Conj
from mmengine.structured_output.json_schema.rewriting.satisfiability import Satisfiable
from mmengine.structured_output.json_schema.vocabulary.refusal import refuse, step

Json = dict[str, object]
Part = Callable[[Conj], Json | Literal[True]]
MAX_ITEMS = 4_096  # of minItems: an answer has to have as many
MAX_WAYS = 16  # through an automaton that are written as an array each


def array_schemas(piece: Array, conj: Conj, satisfiable: Satisfiable, part: Part) -> list[Json]:
    """Alternatives, usually one. `part` writes the schema of an item."""
    if not piece.counts_together():
        return [_array(piece, conj, satisfiable, part)]
    found = satisfiable.sequences[piece].useful(satisfiable.yes)
    assert found is not None  # or the piece would not be written
    if not isinstance(found, Steps):
        distinct: Json = {
            "values": [part(value) for value in found.values],
            "minItems": found.low,
            "maxItems": found.high,
            "matching": found.matching,
            "minContains": found.least,
            "maxContains": found.most,
        }
        return [{"type": "array", "uniqueItems": True, "x-distinct": distinct}]
    ways = _ways(found)
    if ways is not None:
        return [_tuple([part(one) for one in way]) for way in ways]
    edges = [[start, to, part(one)] for start, to, one in found.edges]
    steps: Json = {"edges": edges, "ends": sorted(found.ends)}
    return [{"type": "array", "uniqueItems": True, "x-steps": steps}]


def _array(piece: Array, conj: Conj, satisfiable: Satisfiable, part: Part) -> Json:
    yes = satisfiable.yes
    pointer = satisfiable.shapes.pointer(conj)
    high = piece.high
    for at, one in enumerate(piece.prefix):
        if one not in yes:
            high = at if high is None else min(high, at)
            break
    if piece.rest not in yes and (high is None or high > len(piece.prefix)):
        high = len(piece.prefix)
    if piece.low > MAX_ITEMS:
        refuse("minItems", step(pointer, "minItems"), f"more than {MAX_ITEMS:,} items cannot be counted")
    out: Json = {"type": "array"}
    prefix = piece.prefix if high is None else piece.prefix[:high]
    if prefix:
        out["prefixItems"] = [part(one) for one in prefix]
    out["items"] = part(piece.rest) if piece.rest in yes else False
    if piece.low:
        out["minItems"] = piece.low
    if high is not None:
        out["maxItems"] = high
    return out


def _tuple(items: list[Json | Literal[True]]) -> Json:
    out: Json = {"type": "array", "items": False}
    if items:
        out["prefixItems"] = items
        out["minItems"] = len(items)
    return {**out, "maxItems": len(items)}


def _ways(steps: Steps) -> list[list[Conj]] | None:
    """Every way from the first state to an end, or None where there are too many."""
    after = defaultdict(list)
    for start, to, one in steps.edges:
        after[start].append((to, one))
    out: list[list[Conj]] = []
    waiting: list[tuple[int, list[Conj]]] = [(0, [])]
    while waiting:
        state, way = waiting.pop(0)
        if state in steps.ends:
            out.append(way)
        if len(out) > MAX_WAYS or len(way) > MAX_WAYS or len(waiting) > MAX_WAYS:
            return None
        waiting += [(to, [*way, one]) for to, one in after[state]]
    return out
