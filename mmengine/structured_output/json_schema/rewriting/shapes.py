"""Expands a conjunction of schemas into shapes. A shape has a constraint for each JSON type. Every allowed
value has at least one of the shapes, unless the conjunction is in `Shapes.narrowed`. In-place keywords ($ref,
allOf, anyOf, oneOf, dependentSchemas, …) are expanded exactly or refused. Each alternative records which
schemas apply, and excludes values of schemas that must not apply (negation.py).

constraints/json_types.py explains the terms part, place, conjunction, constraint and shape.
"""

from dataclasses import dataclass, field

from msgspec.structs import replace

from mmengine.structured_output.json_schema.constraints.comparison import simplify_shapes
from mmengine.structured_output.json_schema.constraints.json_types import (
    UNCONSTRAINED,
    Conjunction,
    Object,
    Shape,
)
from mmengine.structured_output.json_schema.reading.document import Document, scalar_type
from mmengine.structured_output.json_schema.reading.dynamic_references import dynamic_target
from mmengine.structured_output.json_schema.rewriting.alternatives import (
    Choice,
    any_of,
    branches_of,
    dependent,
    if_then_else,
    one_of,
    pointer_of,
)
from mmengine.structured_output.json_schema.rewriting.enforceability import Enforceability
from mmengine.structured_output.json_schema.rewriting.expansion import (
    Expansion,
    OpenChoice,
    PendingSchema,
    is_assertion,
    places_below,
    property_names,
)
from mmengine.structured_output.json_schema.rewriting.key_order import order_properties
from mmengine.structured_output.json_schema.rewriting.key_patterns import separate_keys
from mmengine.structured_output.json_schema.rewriting.keyword_shapes import (
    SCALARS,
    KeywordShape,
    keyword_shape,
)
from mmengine.structured_output.json_schema.rewriting.negation import Exclusion, Origin
from mmengine.structured_output.json_schema.rewriting.unevaluated import (
    KEYWORDS,
    check_alternatives_decided,
    restricts_unevaluated,
    unevaluated_shape,
)
from mmengine.structured_output.json_schema.vocabulary.refusal import (
    SchemaRefused,
    refuse,
)
from mmengine.structured_output.json_schema.work import comparisons_of, spend_work

# Keywords that `_apply` expands. EXPANDED_KEYWORDS also contains unevaluatedItems and unevaluatedProperties.
IN_PLACE = frozenset(
    ("$ref", "allOf", "anyOf", "oneOf", "dependentRequired", "dependentSchemas", "not", "if", "$dynamicRef")
)
EXPANDED_KEYWORDS = IN_PLACE | frozenset(KEYWORDS)
MAX_SHAPES = 512  # Maximum number of shapes of a conjunction.
MAX_EARLY = 16  # An exclusion that leaves more shapes is postponed until all choices are made.
MAX_STEPS = 50_000  # Maximum number of steps in the expansion of a schema.
MAX_PLACES = 20_000  # Maximum number of different conjunctions.


@dataclass(slots=True)
class Shapes:
    document: Document
    known: dict[Conjunction, list[Shape]] = field(default_factory=dict)
    busy: set[Conjunction] = field(default_factory=set)
    # Synthetic place -> conjunction whose negation the place represents.
    negated: dict[int, tuple[Conjunction, Origin]] = field(default_factory=dict)
    unions: dict[int, Choice] = field(default_factory=dict)  # Synthetic place -> alternatives.
    own: dict[int, KeywordShape] = field(default_factory=dict)  # Place -> shape for its own keywords.
    # Conjunctions without any possible shape.
    impossible: set[Conjunction] = field(default_factory=set)
    # Conjunctions whose shapes do not cover all allowed values.
    narrowed: set[Conjunction] = field(default_factory=set)
    # The exclusions that left out allowed values.
    narrow_at: dict[Origin, None] = field(default_factory=dict)
    steps: int = 0
    enforceable: Enforceability = field(init=False)

    def __post_init__(self) -> None:
        self.enforceable = Enforceability(self.document, self._own)

    def of(self, conj: Conjunction) -> list[Shape]:
        found = self.known.get(conj)
        if found is None:
            if len(self.known) >= MAX_PLACES:
                refuse("", "", f"references and combinations expand to more than {MAX_PLACES:,} schemas")
            if len(conj) == 1 and (scalar := scalar_type(self.document.nodes[conj[0]].schema)):
                found = self.known[conj] = [SCALARS[scalar]]
                return found
            if conj in self.busy:
                refuse(
                    "", self.pointer(conj), "its meaning depends on itself, by a oneOf, not or if inside it"
                )
            self.busy.add(conj)
            try:
                expanded = self._expand_single(conj)
                if expanded is None:
                    items = [PendingSchema(place, (), (at,)) for at, place in enumerate(conj)]
                    expanded = self._expand(Expansion([UNCONSTRAINED], items), conj)
                found = [self._separate_keys(shape, conj) for shape in expanded]
                possible = simplify_shapes([self._possible(shape) for shape in found])
            finally:
                self.busy.remove(conj)
            if not any(possible):
                self.impossible.add(conj)
            # An impossible conjunction keeps a shape for the error message.
            found = self.known[conj] = possible or found[:1]
        return found

    def _expand_single(self, conj: Conjunction) -> list[Shape] | None:
        """Return the shapes for a single schema without in-place keywords, or None for any other conjunction.
        Faster than `_expand`.
        """
        if len(conj) != 1:
            return None
        schema = self.document.nodes[conj[0]].schema
        if isinstance(schema, bool) or not EXPANDED_KEYWORDS.isdisjoint(schema):
            return None
        shape, choice = self._own(conj[0])
        if choice is not None:
            return None
        self._step(conj)
        return (
            [order_properties(shape, [property_names(schema)] if schema.get("properties") else [])]
            if shape
            else []
        )

    def _own(self, place: int) -> KeywordShape:
        if place not in self.own:
            self.own[place] = keyword_shape(self.document, place)
        return self.own[place]

    def _separate_keys(self, shape: Shape, conj: Conjunction) -> Shape:
        """Return the shape with key patterns that do not overlap."""
        constraint = shape.get("object")
        if not isinstance(constraint, Object) or not constraint.names and len(constraint.patterns) < 2:
            return shape
        for name in constraint.names:
            if (name,) in self.busy:
                refuse("propertyNames", self.pointer(conj), "the reference leads back to itself")
        separated = separate_keys(
            constraint, self.of, self.false_schema(), self.pointer(conj), self.document.budget
        )
        return {**shape, "object": separated}

    def proven_shapes(self, conj: Conjunction) -> list[Shape]:
        """Return shapes that cover every allowed value. Returns UNCONSTRAINED if the shapes from `of` lack
        some values.
        """
        found = self.of(conj)
        return [UNCONSTRAINED] if conj in self.narrowed else found

    def pointer(self, conj: Conjunction) -> str:
        return self.document.nodes[conj[0]].pointer if conj else ""

    def false_schema(self) -> Conjunction:
        return (self.document.make(False, "", "nothing"),)

    def make(self, schema: dict | bool, place: int, key: object) -> Conjunction:
        return (self.document.make(schema, self.document.nodes[place].pointer, (place, key)),)

    def complement(self, place: int) -> Conjunction:
        """Return a conjunction for values that violate the schema at `place`, for maxContains."""
        pointer = self.document.nodes[place].pointer
        return self.complement_of(
            (place,), Origin("contains", pointer, "the exclusion", "leave maxContains out")
        )

    def allows_anything(self, place: int) -> bool:
        """Return whether the schema at `place` has no constraint."""
        schema = self.document.nodes[place].schema
        if place in self.negated or place in self.unions:
            return False
        return schema is True or isinstance(schema, dict) and not any(map(is_assertion, schema))

    def is_impossible(self, conj: Conjunction) -> bool:
        """Return whether provably no value satisfies the conjunction."""
        if any(self.document.nodes[place].schema is False for place in conj):
            return True
        if conj in self.busy:
            return False
        try:
            self.of(conj)
        except SchemaRefused:
            return False
        return conj in self.impossible and conj not in self.narrowed

    def complement_of(self, conj: Conjunction, origin: Origin) -> Conjunction:
        """Return a conjunction for values that violate a schema in `conj`."""
        if len(conj) == 1:
            (place,) = conj
            schema = self.document.nodes[place].schema
            if place in self.negated:
                return self.union([self.negated[place][0]])
            if isinstance(schema, dict) and [name for name in schema if is_assertion(name)] == ["not"]:
                return self.union([(self.document.subschema(place, "not"),)])
        made = self.document.make(True, origin.pointer, ("not", conj, origin))
        self.negated[made] = (conj, origin)
        return (made,)

    def union(self, choice: Choice) -> Conjunction:
        """Return a conjunction for values that satisfy an alternative in `choice`. For unevaluatedProperties
        and unevaluatedItems, the alternatives evaluate no properties and no items.
        """
        made = self.document.make(True, self.pointer(choice[0]), ("union", tuple(choice)))
        self.unions[made] = choice
        return (made,)

    def _step(self, conj: Conjunction, count: int = 1) -> None:
        self.steps += count
        spend_work(count)
        if self.steps > MAX_STEPS:
            refuse("", self.pointer(conj), f"expanding the alternatives takes more than {MAX_STEPS:,} steps")

    def _expand(self, work: Expansion, conj: Conjunction) -> list[Shape]:
        self._step(conj)
        seen = {each.place for each in work.held}
        while work.todo and work.shapes:
            item = work.todo.pop(0)
            if item.place in item.path:
                pointer = self.document.nodes[item.place].pointer
                refuse("$ref", pointer, "the reference leads back to itself")
            work.held += (item,)
            if item.place not in seen:
                seen.add(item.place)
                self._add(work, item._replace(path=(*item.path, item.place)))
        if work.lacks_branches:
            self.narrowed.add(conj)
        if not work.choices:
            self._add_unevaluated(work)
        self._exclude(work, conj)
        if not work.choices or not work.shapes:
            groups = self._groups(work)
            return [order_properties(shape, groups) for shape in work.shapes]
        now, *rest = work.choices
        out: list[Shape] = []
        for branch in now.choice:
            todo = [PendingSchema(place, now.path, (*now.where, at)) for at, place in enumerate(branch)]
            taken = Expansion(work.shapes, todo, work.held, tuple(rest), work.excluded, taken=True)
            out += self._expand(taken, conj)
            self._check_count(out, conj)
        return out

    def _check_count(self, shapes: list[Shape], conj: Conjunction) -> None:
        if len(shapes) > MAX_SHAPES:
            why = f"anyOf, oneOf and allOf together expand to more than {MAX_SHAPES} alternatives"
            refuse("anyOf", self.pointer(conj), why)

    def _exclude(self, work: Expansion, conj: Conjunction) -> None:
        """Exclude the values of negated schemas. An exclusion that leaves many shapes is postponed until all
        choices are made.
        """
        if work.taken:
            work.shapes = [some for shape in work.shapes if (some := self._possible(shape))]
        waiting: tuple[tuple[Conjunction, Origin], ...] = ()
        for excluded, origin in work.excluded:
            exclusion = Exclusion(self, origin, self.document.budget)
            found = self.of(excluded)
            if excluded in self.narrowed:
                refuse(*origin.blocked("a part of it is enforced more narrowly than defined"))
            left = work.shapes
            with comparisons_of(origin.keyword, origin.pointer):
                for shape in found:
                    self._step(conj, len(left))
                    left = [kept for each in left for kept in exclusion.shapes(each, shape)]
                    left = simplify_shapes([kept for each in left if (kept := self._possible(each))])
                    self._check_count(left, conj)
            if work.choices and (exclusion.narrow or exclusion.stuck or len(left) > MAX_EARLY):
                waiting += ((excluded, origin),)
                continue
            work.shapes = left
            if exclusion.narrow:
                self.narrowed.add(conj)
                self.narrow_at[replace(origin, inner=False, free=False)] = None
        work.excluded = waiting

    def _possible(self, shape: Shape) -> Shape:
        """Return the shape, without its object constraint if a required property has no possible value."""
        constraint = shape.get("object")
        if isinstance(constraint, Object):
            parts_of = [constraint.property(name) for name in constraint.required]
            if any(self._is_false(part) or len(part) > 1 and self.is_impossible(part) for part in parts_of):
                return {kind: other for kind, other in shape.items() if kind != "object"}
        return shape

    def _is_false(self, conj: Conjunction) -> bool:
        return any(self.document.nodes[place].schema is False for place in conj)

    def _groups(self, work: Expansion) -> list[tuple[str, ...]]:
        """Return each schema's property names. The schemas are in document order."""
        found: dict[int, tuple[tuple[int, ...], tuple[str, ...]]] = {}
        for place, _, where in work.held:
            schema = self.document.nodes[place].schema
            if isinstance(schema, dict) and schema.get("properties"):
                names = property_names(schema)
                found.setdefault(place, ((*where, list(schema).index("properties")), names))
        return [names for _, names in sorted(found.values())]

    def _enforceable(self, choice: Choice, work: Expansion, keyword: str, pointer: str) -> Choice:
        kept = self.enforceable.branches(choice, keyword, pointer)
        work.lacks_branches |= len(kept) < len(choice)
        return kept

    def _one_of(self, place: int, work: Expansion, pointer: str) -> Choice:
        """Return the enforceable oneOf branches. Each branch excludes the values of all other branches."""
        branches = branches_of(self.document, place, "oneOf")
        kept = set(self._enforceable(branches, work, "oneOf", pointer))
        rivals = [
            self.enforceable.wider(branch) if branch not in kept or self._is_narrowed(branch) else branch
            for branch in branches
        ]
        found = one_of(self.document, place, branches, rivals, self, self.proven_shapes)
        return [without for branch, without in zip(branches, found, strict=True) if branch in kept]

    def _is_narrowed(self, conj: Conjunction) -> bool:
        self.of(conj)
        return conj in self.narrowed

    def _add_unevaluated(self, work: Expansion) -> None:
        asking = {
            each.place for each in work.held if restricts_unevaluated(self.document.nodes[each.place].schema)
        }
        if not asking:
            return
        held: dict[int, list[int]] = {}
        for place, path, _ in work.held:
            if path:
                held.setdefault(path[-1], []).append(place)
        first = {each.place: each.path for each in reversed(work.held)}
        for place in asking:
            for below in places_below(held, place):
                check_alternatives_decided(self.document, below, (*first[below], below), place)
            shape = unevaluated_shape(self.document, place, held, self.union)
            work.meet(shape)

    def _add(self, work: Expansion, item: PendingSchema) -> None:
        """Add a schema to the expansion."""
        if item.place in self.negated:
            work.excluded += (self.negated[item.place],)
            return
        if item.place in self.unions:
            work.choices += (OpenChoice((), item.where, self.unions[item.place]),)
            return
        node = self.document.nodes[item.place]
        schema = node.schema
        if isinstance(schema, bool):
            work.shapes = work.shapes if schema else []
            return
        shape, choice = self._own(item.place)
        work.meet(shape)
        if choice is not None:
            work.choices += (OpenChoice(item.path, item.where, choice),)
        for at, keyword in enumerate(schema):
            if keyword in IN_PLACE:
                self._apply(work, keyword, item._replace(where=(*item.where, at)))

    def _apply(self, work: Expansion, keyword: str, item: PendingSchema) -> None:
        """Expand an in-place keyword."""
        document, (place, path, where) = self.document, item
        value = document.nodes[place].schema[keyword]  # type: ignore[index]
        pointer = pointer_of(document, place, keyword)
        together = any(restricts_unevaluated(document.nodes[each].schema) for each in path)
        choice: Choice | None = None
        match keyword:
            case "$ref":
                work.todo.append(PendingSchema(document.target(place), path, where))
            case "allOf":
                for at in range(len(value)):
                    work.todo.append(
                        PendingSchema(document.subschema(place, keyword, at), path, (*where, at))
                    )
            case "anyOf":
                choice = self._enforceable(any_of(document, place, together), work, keyword, pointer)
            case "oneOf":
                choice = self._one_of(place, work, pointer)
            case "dependentRequired" | "dependentSchemas":
                for name in value:
                    work.choices += (OpenChoice(path, where, dependent(document, place, keyword, name)),)
            case "not":
                origin = Origin("not", pointer, "the exclusion", "say what is allowed instead")
                for made in self.complement_of((document.subschema(place, "not"),), origin):
                    work.todo.append(PendingSchema(made, path, where))
            case "if":
                choice = if_then_else(document, place, self, together)
            case "$dynamicRef":
                work.todo.append(PendingSchema(dynamic_target(document, place), path, where))
        if choice is not None:
            work.choices += (OpenChoice(path, where, choice),)
