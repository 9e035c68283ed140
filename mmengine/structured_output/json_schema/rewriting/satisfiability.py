"""Finds the satisfiable parts of a schema, and explains why a schema allows no value.

A part is satisfiable if some shape for the part needs only satisfiable parts. The result is the least fixed
point of this rule, which excludes endlessly recursive parts.

The terms part, place, conjunction, constraint and shape are explained in constraints/json_types.py.
"""

from dataclasses import dataclass, field

from mmengine.structured_output.json_pointer import join_pointer
from mmengine.structured_output.json_schema.constraints.item_automata import Sequence, build_sequence
from mmengine.structured_output.json_schema.constraints.json_types import (
    Array,
    Conjunction,
    Constraint,
    Object,
)
from mmengine.structured_output.json_schema.rewriting.expansion import parts_of
from mmengine.structured_output.json_schema.rewriting.shapes import Shapes
from mmengine.structured_output.json_schema.vocabulary.keywords import find_contradiction
from mmengine.structured_output.json_schema.vocabulary.refusal import refuse


@dataclass(slots=True)
class Satisfiable:
    shapes: Shapes
    order: list[Conjunction] = field(default_factory=list)  # Every reachable part, beginning with the root.
    inside: dict[Conjunction, list[Conjunction]] = field(
        default_factory=dict
    )  # Part -> the parts inside it; a part that occurs twice is listed twice.
    satisfied: set[Conjunction] = field(default_factory=set)
    sequences: dict[Array, Sequence] = field(default_factory=dict)  # Arrays with `contains` or `uniqueItems`.

    def solve(self, root: Conjunction) -> None:
        """Compute all attributes for the schema `root`. Refuses a root without any value."""
        found = {root: None}
        self.order = [root]
        for conj in self.order:  # The list grows during the loop.
            inside = self.inside[conj] = []
            for shape in self.shapes.of(conj):
                for constraint in shape.values():
                    if isinstance(constraint, Array | Object):
                        inside += self._parts(constraint, conj)
                    else:
                        self.satisfied.add(conj)
            for part in inside:
                if part not in found:
                    found[part] = None
                    self.order.append(part)
        left = [conj for conj in reversed(self.order) if conj not in self.satisfied]
        grown = True
        while grown:
            before, left = left, [conj for conj in left if not self._check(conj)]
            grown = len(left) < len(before)
        if root not in self.satisfied:
            self._explain(root, frozenset())

    def _check(self, conj: Conjunction) -> bool:
        """Add `conj` to `satisfied` if some shape needs only satisfied parts.

        Returns whether the part was added.
        """
        for shape in self.shapes.of(conj):
            for constraint in shape.values():
                if self.allows(constraint):
                    self.satisfied.add(conj)
                    return True
        return False

    def _parts(self, constraint: Constraint, conj: Conjunction) -> list[Conjunction]:
        if (
            isinstance(constraint, Array)
            and constraint.counts_together()
            and constraint not in self.sequences
        ):

            def make(schema: dict | bool, key: object) -> Conjunction:
                return self.shapes.make(schema, conj[0], key)

            found = build_sequence(constraint, self.shapes.of, make, self.shapes.complement)
            self.sequences[constraint] = found
        return self.parts(constraint)

    def parts(self, constraint: Constraint) -> list[Conjunction]:
        """Return the parts inside a constraint: the schemas for an array's items or an object's
        properties.
        """
        if isinstance(constraint, Array) and constraint.counts_together():
            return self.sequences[constraint].parts()
        return parts_of(constraint)

    def allows(self, constraint: Constraint) -> bool:
        if not isinstance(constraint, Array | Object):
            return True
        if isinstance(constraint, Array) and constraint.counts_together():
            return self.sequences[constraint].restrict_to(self.satisfied) is not None
        if isinstance(constraint, Array):
            needed = [constraint.item(at) for at in range(min(constraint.low, len(constraint.prefix) + 1))]
            return all(part in self.satisfied for part in needed)
        if not all(constraint.property(name) in self.satisfied for name in constraint.required):
            return False
        least = max(constraint.low, len(constraint.required))
        if constraint.high is not None and least > constraint.high:
            return False
        return not constraint.low or self.is_open(constraint) or least <= self.max_named_keys(constraint)

    def is_open(self, constraint: Object) -> bool:
        """Return whether an object may have keys that the schema does not name."""
        yes = self.satisfied
        return constraint.rest in yes or any(conj in yes for _, conj in constraint.patterns.values())

    def max_named_keys(self, constraint: Object) -> int:
        names = dict.fromkeys((*constraint.properties, *constraint.required))
        return sum(constraint.property(name) in self.satisfied for name in names)

    def _explain(self, conj: Conjunction, seen: frozenset[Conjunction]) -> None:
        pointer = self.shapes.pointer(conj)
        if conj in seen:
            refuse("$ref", pointer, "recursion without a base: only an infinite value could satisfy it")
        shapes = self.shapes.of(conj)
        self._explain_places(conj)
        if not shapes:
            schema = self.shapes.document.nodes[conj[0]].schema if conj else True
            why = (
                "the schema false allows nothing" if schema is False else "its keywords contradict each other"
            )
            if conj in self.shapes.narrowed:
                found = self.shapes.document.narrowings.all()
                why = f"no value can be enforced; {found[0].text if found else 'it is enforced narrowly'}"
            refuse("", pointer, why)
        for shape in shapes:
            for constraint in shape.values():
                if isinstance(constraint, Array) and constraint.counts_together():
                    self._explain_sequence(constraint, conj)
                elif isinstance(constraint, Array):
                    for at in range(min(constraint.low, len(constraint.prefix) + 1)):
                        if constraint.item(at) not in self.satisfied:
                            self._explain(constraint.item(at), seen | {conj})
                if isinstance(constraint, Object):
                    self._explain_object(constraint, conj, seen)
        refuse("", pointer, "nothing satisfies it")

    def _explain_sequence(self, constraint: Array, conj: Conjunction) -> None:
        pointer = (
            constraint.contains[0].pointer
            if constraint.contains
            else constraint.unique or self.shapes.pointer(conj)
        )
        keyword = "contains" if constraint.contains else "uniqueItems"
        refuse(keyword, pointer, "no array has enough items that satisfy it")

    def _explain_places(self, conj: Conjunction) -> None:
        """Refuse the schema if two keywords in one schema object contradict each other."""
        for node in (self.shapes.document.nodes[place] for place in conj):
            found = find_contradiction(node.schema) if isinstance(node.schema, dict) else None
            if found:
                names, why = found
                refuse(str(names[0]), join_pointer(node.pointer, *names), why)

    def _explain_object(self, constraint: Object, conj: Conjunction, seen: frozenset[Conjunction]) -> None:
        pointer = self.shapes.pointer(conj)
        for name in constraint.required:
            part = constraint.property(name)
            if part not in self.satisfied and name not in constraint.properties:
                refuse("required", join_pointer(pointer, "required"), f'"{name}" is required but not allowed')
            if part not in self.satisfied:
                self._explain(part, seen | {conj})
        if constraint.high is not None and len(constraint.required) > constraint.high:
            count = len(constraint.required)
            why = f"at most {constraint.high} properties are allowed, but {count} are required"
            refuse("maxProperties", join_pointer(pointer, "maxProperties"), why)
        count = self.max_named_keys(constraint)
        why = f"at least {constraint.low} properties are required, but only {count} are allowed"
        refuse("minProperties", join_pointer(pointer, "minProperties"), why)
