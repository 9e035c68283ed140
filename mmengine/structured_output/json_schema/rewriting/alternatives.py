"""Rewrites keywords such as anyOf into lists of alternatives. A value must satisfy at least one alternative.

The terms part, place, conjunction, constraint and shape are explained in constraints/json_types.py.
"""

from itertools import combinations

from mmengine.structured_output.json_pointer import join_pointer
from mmengine.structured_output.json_schema.constraints.comparison import ShapesOf, are_disjoint
from mmengine.structured_output.json_schema.constraints.json_types import Conjunction
from mmengine.structured_output.json_schema.reading.document import Document
from mmengine.structured_output.json_schema.rewriting.negation import Origin, Parts
from mmengine.structured_output.json_schema.vocabulary.refusal import refuse
from mmengine.structured_output.json_schema.work import comparisons_of

Choice = list[Conjunction]
MAX_BRANCHES = 6  # Maximum number of anyOf branches if all combinations are listed.
# Maximum number of shapes in a oneOf. The limit bounds the time to compare the shapes pairwise.
MAX_PAIRS = 512


def pointer_of(document: Document, place: int, keyword: str) -> str:
    return join_pointer(document.nodes[place].pointer, keyword)


def branches_of(document: Document, place: int, keyword: str) -> Choice:
    value = document.nodes[place].schema[keyword]  # type: ignore[index]
    return [(document.subschema(place, keyword, at),) for at in range(len(value))]


def any_of(document: Document, place: int, together: bool) -> Choice:
    """Return an anyOf's branches or, with `together`, every combination of its branches. Keywords such as
    unevaluatedProperties need combinations, because they depend on the satisfied branches.
    """
    branches = branches_of(document, place, "anyOf")
    if not together:
        return branches
    if len(branches) > MAX_BRANCHES:
        why = f"at most {MAX_BRANCHES} branches are supported with unevaluatedProperties or unevaluatedItems"
        refuse("anyOf", pointer_of(document, place, "anyOf"), why)
    sets = (some for size in range(1, len(branches) + 1) for some in combinations(branches, size))
    return [tuple(one for branch in some for one in branch) for some in sets]


def one_of(
    document: Document, place: int, branches: Choice, rivals: Choice, parts: Parts, shapes_of: ShapesOf
) -> Choice:
    """Return each branch of a oneOf without the values of other branches.

    `rivals`: for each branch, a schema that allows at least the branch's values. If two branches overlap,
    each branch excludes the other branch's rival.
    """
    pointer = pointer_of(document, place, "oneOf")
    shapes = [shapes_of(rival) for rival in rivals]
    if sum(map(len, shapes)) > MAX_PAIRS:
        refuse("oneOf", pointer, f"the branches expand to more than {MAX_PAIRS} alternatives")
    out = list(branches)
    with comparisons_of("oneOf", pointer):
        overlapping = [
            (earlier, later)
            for later in range(len(branches))
            for earlier in range(later)
            if not all(are_disjoint(shapes_of, a, b) for a in shapes[earlier] for b in shapes[later])
        ]
    for earlier, later in overlapping:
        trouble = f"branches {earlier} and {later} may both hold, and the difference between them"
        advice = "use anyOf, or a required property whose const differs"
        origin = Origin("oneOf", pointer, trouble, advice)
        out[earlier] += parts.complement_of(rivals[later], origin)
        out[later] += parts.complement_of(rivals[earlier], origin)
    return out


def if_then_else(document: Document, place: int, parts: Parts, together: bool) -> Choice | None:
    """Return two alternatives: the condition with `then`, and the negated condition with `else`.

    If neither `then` nor `else` exists, returns None or, with `together` (see `any_of`), the condition and an
    alternative that allows any value.
    """
    schema = document.nodes[place].schema
    assert isinstance(schema, dict)
    test: Conjunction = (document.subschema(place, "if"),)
    branches: dict[str, Conjunction] = {
        name: (document.subschema(place, name),) for name in ("then", "else") if name in schema
    }
    if not branches:
        return [test, ()] if together else None
    advice = "use anyOf with a property that distinguishes the branches"
    origin = Origin("if", pointer_of(document, place, "if"), "the negated condition", advice)
    fails = parts.complement_of(test, origin)
    return [(*test, *branches.get("then", ())), (*fails, *branches.get("else", ()))]


def dependent(document: Document, place: int, keyword: str, name: str) -> Choice:
    """Return two alternatives: the property is absent, or the property is present and its
    requirements hold.
    """
    node = document.nodes[place]

    def make(schema: dict, key: str) -> Conjunction:
        return (document.make(schema, node.pointer, (place, keyword, name, key)),)

    lacks = make({"properties": {name: False}}, "lacks")
    value = node.schema[keyword][name]  # type: ignore[index]
    names = [name, *(value if keyword == "dependentRequired" else ())]
    needs = make({"type": "object", "required": list(dict.fromkeys(names))}, "needs")
    if keyword == "dependentSchemas":
        needs += (document.subschema(place, keyword, name),)
    return [lacks, needs]
