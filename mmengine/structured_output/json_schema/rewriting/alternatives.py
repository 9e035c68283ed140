"""Keywords that leave a choice, as the alternatives one of which must hold."""

from itertools import combinations

from mmengine.structured_output.json_schema.constraints.comparison import ShapesOf, disjoint
from mmengine.structured_output.json_schema.constraints.json_types import Conj
from mmengine.structured_output.json_schema.reading.document import Document
from mmengine.structured_output.json_schema.rewriting.negation import Origin, Parts
from mmengine.structured_output.json_schema.vocabulary.refusal import refuse, step

Choice = list[Conj]
MAX_BRANCHES = 6  # of an anyOf several of whose branches may hold, where it matters which
MAX_PAIRS = 512  # shapes of all branches of a oneOf, each of which is compared with each


def pointer_of(document: Document, place: int, keyword: str) -> str:
    return step(document.nodes[place].pointer, keyword)


def branches_of(document: Document, place: int, keyword: str) -> Choice:
    value = document.nodes[place].schema[keyword]  # type: ignore[index]
    return [(document.at(place, keyword, at),) for at in range(len(value))]


def any_of(document: Document, place: int, together: bool) -> Choice:
    """`together`: each set of branches, as it matters which of them hold."""
    branches = branches_of(document, place, "anyOf")
    if not together:
        return branches
    if len(branches) > MAX_BRANCHES:
        why = f"with unevaluatedProperties or unevaluatedItems it has at most {MAX_BRANCHES} branches"
        refuse("anyOf", pointer_of(document, place, "anyOf"), why)
    sets = (some for size in range(1, len(branches) + 1) for some in combinations(branches, size))
    return [tuple(one for branch in some for one in branch) for some in sets]


def one_of(document: Document, place: int, parts: Parts, shapes_of: ShapesOf) -> Choice:
    """Each branch, without the others that may hold beside it."""
    branches = branches_of(document, place, "oneOf")
    pointer = pointer_of(document, place, "oneOf")
    shapes = [shapes_of(branch) for branch in branches]
    if sum(map(len, shapes)) > MAX_PAIRS:
        refuse("oneOf", pointer, f"its branches come to more than {MAX_PAIRS} alternatives")
    out = list(branches)
    for later in range(len(branches)):
        for earlier in range(later):
            if all(disjoint(shapes_of, a, b) for a in shapes[earlier] for b in shapes[later]):
                continue
            trouble = f"branches {earlier} and {later} may both hold, and what only one of them allows"
            advice = "use anyOf, or a required property whose const differs"
            origin = Origin("oneOf", pointer, trouble, advice)
            out[earlier] += parts.opposite(branches[later], origin)
            out[later] += parts.opposite(branches[earlier], origin)
    return out


def if_then_else(document: Document, place: int, parts: Parts, together: bool) -> Choice | None:
    """The condition and `then`, or not the condition and `else`. None: there is nothing to choose."""
    schema = document.nodes[place].schema
    assert isinstance(schema, dict)
    test: Conj = (document.at(place, "if"),)
    branches: dict[str, Conj] = {
        name: (document.at(place, name),) for name in ("then", "else") if name in schema
    }
    if not branches:
        return [test, ()] if together else None
    advice = "use anyOf with a property that tells"
    origin = Origin("if", pointer_of(document, place, "if"), "what does not meet it", advice)
    fails = parts.opposite(test, origin)
    return [(*test, *branches.get("then", ())), (*fails, *branches.get("else", ()))]


def dependent(document: Document, place: int, keyword: str, name: str) -> Choice:
    """Without the property, or with what it brings along."""
    node = document.nodes[place]

    def make(schema: dict, key: str) -> Conj:
        return (document.make(schema, node.pointer, (place, keyword, name, key)),)

    lacks = make({"properties": {name: False}}, "lacks")
    value = node.schema[keyword][name]  # type: ignore[index]
    names = [name, *(value if keyword == "dependentRequired" else ())]
    needs = make({"type": "object", "required": list(dict.fromkeys(names))}, "needs")
    if keyword == "dependentSchemas":
        needs += (document.at(place, keyword, name),)
    return [lacks, needs]
