"""What a conjunction of schemas allows: a list of shapes, one of which a value must have.

Every in-place keyword ($ref, allOf, anyOf, oneOf, dependentSchemas, …) is worked in here, exactly or not at
all, so that what is left says one thing in one place: a type with its own constraints. Each alternative knows
which schemas hold in it, and leaves out those that must not (negation.py).
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from mmengine.structured_output.json_schema.constraints.comparison import simplified
from mmengine.structured_output.json_schema.constraints.json_types import (
    KINDS,
    Array,
    Conj,
    Object,
    Shape,
    intersect_shapes,
)
from mmengine.structured_output.json_schema.reading.document import Document, scalar_type
from mmengine.structured_output.json_schema.reading.dynamic_references import dynamic_target
from mmengine.structured_output.json_schema.rewriting.alternatives import (
    Choice,
    any_of,
    dependent,
    if_then_else,
    one_of,
    pointer_of,
)
from mmengine.structured_output.json_schema.rewriting.key_order import arranged
from mmengine.structured_output.json_schema.rewriting.key_patterns import plain_keys
from mmengine.structured_output.json_schema.rewriting.keyword_shapes import SCALARS, Own, own_shape
from mmengine.structured_output.json_schema.rewriting.negation import Exclusion, Origin
from mmengine.structured_output.json_schema.rewriting.unevaluated import (
    KEYWORDS,
    asks,
    check_decided,
    unevaluated_shape,
)
from mmengine.structured_output.json_schema.vocabulary.keywords import ANNOTATIONS, ASSERTIONS
from mmengine.structured_output.json_schema.vocabulary.refusal import SchemaRefused, refuse

# What `_apply` knows, and what else makes a shape from more than a schema's own keywords.
IN_PLACE = frozenset(
    ("$ref", "allOf", "anyOf", "oneOf", "dependentRequired", "dependentSchemas", "not", "if", "$dynamicRef")
)
WORKED_IN = IN_PLACE | frozenset(KEYWORDS)
MAX_SHAPES = 512  # of one place, after anyOf and oneOf are multiplied out
MAX_EARLY = 16  # shapes of one place before all choices are taken
MAX_STEPS = 50_000  # of multiplying out, in all
MAX_PLACES = 20_000  # different conjunctions


class Item(NamedTuple):
    """A schema to be added: its place, the places that led to it, and where in their text it stands."""

    place: int
    path: tuple[int, ...]
    where: tuple[int, ...]


class Open(NamedTuple):
    """A choice that is not taken yet, and the Item of its branches."""

    path: tuple[int, ...]
    where: tuple[int, ...]
    choice: Choice


class Work(msgspec.Struct):
    """The state of one expansion: what holds so far, what is still to be added, what to choose from."""

    shapes: list[Shape]  # one of which a value must have
    todo: list[Item]
    held: tuple[Item, ...] = ()  # all that was added, once for each way that led to it
    choices: tuple[Open, ...] = ()
    excluded: tuple[tuple[Conj, Origin], ...] = ()  # none of which may hold, and still to be taken out
    taken: bool = False  # whether a choice was

    def meet(self, shape: Shape) -> None:
        if len(self.shapes) == 1 and self.shapes[0] is KINDS:
            self.shapes = [shape] if shape else []
            return
        self.shapes = [met for each in self.shapes if (met := intersect_shapes(each, shape))]


@dataclass(slots=True)
class Shapes:
    document: Document
    known: dict[Conj, list[Shape]] = field(default_factory=dict)
    busy: set[Conj] = field(default_factory=set)
    negated: dict[int, tuple[Conj, Origin]] = field(default_factory=dict)  # made places: not what is here
    unions: dict[int, Choice] = field(default_factory=dict)  # made places: one of what is here
    own: dict[int, Own] = field(default_factory=dict)  # by place: what its keywords say themselves
    impossible: set[Conj] = field(default_factory=set)  # which nothing satisfies, plainly
    narrowed: set[Conj] = field(default_factory=set)  # whose shapes lack some of what they allow
    narrow_at: dict[Origin, None] = field(default_factory=dict)  # keywords that made them lack it
    steps: int = 0

    def of(self, conj: Conj) -> list[Shape]:
        found = self.known.get(conj)
        if found is None:
            if len(self.known) >= MAX_PLACES:
                refuse("", "", f"its references and combinations come to more than {MAX_PLACES:,} schemas")
            if len(conj) == 1 and (scalar := scalar_type(self.document.nodes[conj[0]].schema)):
                found = self.known[conj] = [SCALARS[scalar]]
                return found
            if conj in self.busy:
                refuse("", self.pointer(conj), "what it is depends on itself, by a oneOf, not or if in it")
            self.busy.add(conj)
            try:
                expanded = self._alone(conj)
                if expanded is None:
                    items = [Item(place, (), (at,)) for at, place in enumerate(conj)]
                    expanded = self._expand(Work([KINDS], items), conj)
                found = [self._plain(shape, conj) for shape in expanded]
                possible = simplified([self._possible(shape) for shape in found])
            finally:
                self.busy.remove(conj)
            if not any(possible):
                self.impossible.add(conj)
            # Of what is impossible one shape is kept, of which it is said why.
            found = self.known[conj] = possible or found[:1]
        return found

    def _alone(self, conj: Conj) -> list[Shape] | None:
        """What `_expand` makes of one schema that leads to no other in its place; None for what is not so."""
        if len(conj) != 1:
            return None
        schema = self.document.nodes[conj[0]].schema
        if isinstance(schema, bool) or not WORKED_IN.isdisjoint(schema):
            return None
        shape, choice = self._own(conj[0])
        if choice is not None:
            return None
        self._step(conj)
        return [arranged(shape, [names_of(schema)] if schema.get("properties") else [])] if shape else []

    def _own(self, place: int) -> Own:
        if place not in self.own:
            self.own[place] = own_shape(self.document, place)
        return self.own[place]

    def _plain(self, shape: Shape, conj: Conj) -> Shape:
        """The shape with the keys of its objects made plain."""
        piece = shape.get("object")
        if not isinstance(piece, Object) or not piece.names and len(piece.patterns) < 2:
            return shape
        for name in piece.names:
            if (name,) in self.busy:
                refuse("propertyNames", self.pointer(conj), "it leads back to itself")
        plain = plain_keys(piece, self.of, self.nothing(), self.pointer(conj), self.document.budget)
        return {**shape, "object": plain}

    def proved(self, conj: Conj) -> list[Shape]:
        """Shapes one of which every value has, for what is concluded from what they lack."""
        found = self.of(conj)
        return [KINDS] if conj in self.narrowed else found

    def pointer(self, conj: Conj) -> str:
        return self.document.nodes[conj[0]].pointer if conj else ""

    def nothing(self) -> Conj:
        return (self.document.make(False, "", "nothing"),)

    def make(self, schema: dict | bool, place: int, key: object) -> Conj:
        return (self.document.make(schema, self.document.nodes[place].pointer, (place, key)),)

    def complement(self, place: int) -> Conj:
        """What the schema at a place does not allow, for maxContains."""
        pointer = self.document.nodes[place].pointer
        return self.opposite(
            (place,), Origin("contains", pointer, "what it excludes", "leave maxContains out")
        )

    def anything(self, place: int) -> bool:
        """Whether the schema of a place plainly allows everything."""
        schema = self.document.nodes[place].schema
        if place in self.negated or place in self.unions:
            return False
        return schema is True or isinstance(schema, dict) and not any(map(asserts, schema))

    def never(self, conj: Conj) -> bool:
        """Whether it is plain that nothing satisfies all of these."""
        if any(self.document.nodes[place].schema is False for place in conj):
            return True
        if conj in self.busy:
            return False
        try:
            self.of(conj)
        except SchemaRefused:
            return False
        return conj in self.impossible and conj not in self.narrowed

    def opposite(self, conj: Conj, origin: Origin) -> Conj:
        """The place of what satisfies not all of these."""
        if len(conj) == 1:
            (place,) = conj
            schema = self.document.nodes[place].schema
            if place in self.negated:
                return self.union([self.negated[place][0]])
            if isinstance(schema, dict) and [name for name in schema if asserts(name)] == ["not"]:
                return self.union([(self.document.at(place, "not"),)])
        made = self.document.make(True, origin.pointer, ("not", conj, origin))
        self.negated[made] = (conj, origin)
        return (made,)

    def union(self, choice: Choice) -> Conj:
        """The place of what satisfies one of these, which then evaluates nothing (unevaluated.py)."""
        made = self.document.make(True, self.pointer(choice[0]), ("union", tuple(choice)))
        self.unions[made] = choice
        return (made,)

    def _step(self, conj: Conj, count: int = 1) -> None:
        self.steps += count
        if self.steps > MAX_STEPS:
            refuse(
                "", self.pointer(conj), f"its alternatives take more than {MAX_STEPS:,} steps to multiply out"
            )

    def _expand(self, work: Work, conj: Conj) -> list[Shape]:
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
        if not work.choices:
            self._add_unevaluated(work)
        self._exclude(work, conj)
        if not work.choices or not work.shapes:
            groups = self._groups(work)
            return [arranged(shape, groups) for shape in work.shapes]
        now, *rest = work.choices
        out: list[Shape] = []
        for branch in now.choice:
            todo = [Item(place, now.path, (*now.where, at)) for at, place in enumerate(branch)]
            taken = Work(work.shapes, todo, work.held, tuple(rest), work.excluded, taken=True)
            out += self._expand(taken, conj)
            self._check_count(out, conj)
        return out

    def _check_count(self, shapes: list[Shape], conj: Conj) -> None:
        if len(shapes) > MAX_SHAPES:
            why = f"its anyOf, oneOf and allOf together come to more than {MAX_SHAPES} alternatives"
            refuse("anyOf", self.pointer(conj), why)

    def _exclude(self, work: Work, conj: Conj) -> None:
        """Takes what must not hold out of the shapes: where it leaves few of them, or no choice is open."""
        if work.taken:
            work.shapes = [some for shape in work.shapes if (some := self._possible(shape))]
        waiting: tuple[tuple[Conj, Origin], ...] = ()
        for excluded, origin in work.excluded:
            exclusion = Exclusion(self, origin, self.document.budget)
            found = self.of(excluded)
            if excluded in self.narrowed:
                refuse(*origin.blocked("some of it is enforced more narrowly than it is defined"))
            left = work.shapes
            for shape in found:
                self._step(conj, len(left))
                left = [kept for each in left for kept in exclusion.shapes(each, shape)]
                left = simplified([kept for each in left if (kept := self._possible(each))])
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
        """The shape without an object that plainly lacks what it requires."""
        piece = shape.get("object")
        if isinstance(piece, Object):
            parts = [piece.property(name) for name in piece.required]
            if any(self._is_false(part) or len(part) > 1 and self.never(part) for part in parts):
                return {kind: other for kind, other in shape.items() if kind != "object"}
        return shape

    def _is_false(self, conj: Conj) -> bool:
        return any(self.document.nodes[place].schema is False for place in conj)

    def _groups(self, work: Work) -> list[tuple[str, ...]]:
        """The names in `properties`, schema by schema, as their keywords stand in the text."""
        found: dict[int, tuple[tuple[int, ...], tuple[str, ...]]] = {}
        for place, _, where in work.held:
            schema = self.document.nodes[place].schema
            if isinstance(schema, dict) and schema.get("properties"):
                names = names_of(schema)
                found.setdefault(place, ((*where, list(schema).index("properties")), names))
        return [names for _, names in sorted(found.values())]

    def _add_unevaluated(self, work: Work) -> None:
        asking = {each.place for each in work.held if asks(self.document.nodes[each.place].schema)}
        if not asking:
            return
        held: dict[int, list[int]] = {}
        for place, path, _ in work.held:
            if path:
                held.setdefault(path[-1], []).append(place)
        first = {each.place: each.path for each in reversed(work.held)}
        for place in asking:
            for below in reached(held, place):
                check_decided(self.document, below, (*first[below], below), place)
            shape = unevaluated_shape(self.document, place, held, self.union)
            work.meet(shape)

    def _add(self, work: Work, item: Item) -> None:
        """Adds one schema to the conjunction."""
        if item.place in self.negated:
            work.excluded += (self.negated[item.place],)
            return
        if item.place in self.unions:
            work.choices += (Open((), item.where, self.unions[item.place]),)
            return
        node = self.document.nodes[item.place]
        schema = node.schema
        if isinstance(schema, bool):
            work.shapes = work.shapes if schema else []
            return
        shape, choice = self._own(item.place)
        work.meet(shape)
        if choice is not None:
            work.choices += (Open(item.path, item.where, choice),)
        for at, keyword in enumerate(schema):
            if keyword in IN_PLACE:
                self._apply(work, keyword, item._replace(where=(*item.where, at)))

    def _apply(self, work: Work, keyword: str, item: Item) -> None:
        """Adds what an in-place keyword says."""
        document, (place, path, where) = self.document, item
        value = document.nodes[place].schema[keyword]  # type: ignore[index]
        pointer = pointer_of(document, place, keyword)
        together = any(asks(document.nodes[each].schema) for each in path)
        choice: Choice | None = None
        match keyword:
            case "$ref":
                work.todo.append(Item(document.target(place), path, where))
            case "allOf":
                for at in range(len(value)):
                    work.todo.append(Item(document.at(place, keyword, at), path, (*where, at)))
            case "anyOf":
                choice = any_of(document, place, together)
            case "oneOf":
                choice = one_of(document, place, self, self.proved)
            case "dependentRequired" | "dependentSchemas":
                for name in value:
                    work.choices += (Open(path, where, dependent(document, place, keyword, name)),)
            case "not":
                origin = Origin("not", pointer, "what it excludes", "say what is allowed instead")
                for made in self.opposite((document.at(place, "not"),), origin):
                    work.todo.append(Item(made, path, where))
            case "if":
                choice = if_then_else(document, place, self, together)
            case "$dynamicRef":
                work.todo.append(Item(dynamic_target(document, place), path, where))
        if choice is not None:
            work.choices += (Open(path, where, choice),)


def names_of(schema: dict) -> tuple[str, ...]:
    """The names in `properties` that may be there."""
    return tuple(name for name, value in schema.get("properties", {}).items() if value is not False)


def asserts(keyword: str) -> bool:
    """Whether the keyword says what a value must be, and not only something about it."""
    return keyword in ASSERTIONS and keyword not in ANNOTATIONS


def reached(held: dict[int, list[int]], place: int) -> list[int]:
    """The places that hold in place below one, itself among them."""
    out = [place]
    for each in out:  # which grows
        out += [below for below in dict.fromkeys(held.get(each, ())) if below not in out]
    return out


def parts(piece: object) -> list[Conj]:
    """The schemas of what is inside an array or an object."""
    if isinstance(piece, Array):
        return [*piece.prefix, piece.rest]
    if isinstance(piece, Object):
        return [*piece.properties.values(), *(conj for _, conj in piece.patterns.values()), piece.rest]
    return []
