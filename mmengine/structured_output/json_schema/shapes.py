"""What a conjunction of schemas allows: a list of shapes, one of which a value must have.

Every in-place keyword ($ref, allOf, anyOf, oneOf, dependentSchemas, …) is worked in here, exactly or not at
all, so that what is left says one thing in one place: a type with its own constraints. `oneOf` becomes a
choice when no value can be in two of its branches, which has to be proved.
"""

from dataclasses import dataclass, field

from mmengine.structured_output.json_schema.disjoint import disjoint
from mmengine.structured_output.json_schema.document import Document
from mmengine.structured_output.json_schema.dynamic import dynamic_target
from mmengine.structured_output.json_schema.keywords import ANNOTATIONS, ASSERTIONS, TYPES
from mmengine.structured_output.json_schema.pieces import KINDS, Array, Conj, Object, Shape, intersect_shapes
from mmengine.structured_output.json_schema.refusal import refuse, step
from mmengine.structured_output.json_schema.rewrite import own_shape

MAX_SHAPES = 512  # of one place, after anyOf and oneOf are multiplied out
MAX_STEPS = 50_000  # of multiplying out, in all
MAX_PLACES = 20_000  # different conjunctions

Choice = list[Conj]


@dataclass(slots=True)
class Work:
    """The state of one expansion: what holds so far, what is still to be added, what to choose from."""

    shape: Shape
    todo: list[tuple[int, tuple[int, ...]]]  # a place, and the places that led to it
    seen: frozenset[int] = frozenset()
    choices: tuple[tuple[tuple[int, ...], Choice], ...] = ()


@dataclass(slots=True)
class Shapes:
    document: Document
    known: dict[Conj, list[Shape]] = field(default_factory=dict)
    busy: set[Conj] = field(default_factory=set)
    steps: int = 0

    def of(self, conj: Conj) -> list[Shape]:
        if conj not in self.known:
            if len(self.known) >= MAX_PLACES:
                refuse("", "", f"its references and combinations come to more than {MAX_PLACES:,} schemas")
            if conj in self.busy:
                refuse("oneOf", self.pointer(conj), "it has itself as a branch of its oneOf")
            self.busy.add(conj)
            self.known[conj] = self._expand(Work(KINDS, [(place, ()) for place in conj]), conj)
            self.busy.remove(conj)
        return self.known[conj]

    def pointer(self, conj: Conj) -> str:
        return self.document.nodes[conj[0]].pointer if conj else ""

    def make(self, schema: dict | bool, place: int, key: object) -> Conj:
        return (self.document.make(schema, self.document.nodes[place].pointer, (place, key)),)

    def _expand(self, work: Work, conj: Conj) -> list[Shape]:
        self.steps += 1
        if self.steps > MAX_STEPS:
            refuse(
                "", self.pointer(conj), f"its alternatives take more than {MAX_STEPS:,} steps to multiply out"
            )
        seen = set(work.seen)
        while work.todo and work.shape:
            place, path = work.todo.pop(0)
            if place in path:
                refuse("$ref", self.document.nodes[place].pointer, "the reference leads back to itself")
            if place not in seen:
                seen.add(place)
                self._add(work, place, (*path, place))
        if not work.shape:
            return []
        if not work.choices:
            return [work.shape]
        (path, choice), *rest = work.choices
        out: list[Shape] = []
        for branch in choice:
            todo = [(place, path) for place in branch]
            out += self._expand(Work(work.shape, todo, frozenset(seen), tuple(rest)), conj)
            if len(out) > MAX_SHAPES:
                why = f"its anyOf, oneOf and allOf together come to more than {MAX_SHAPES} alternatives"
                refuse("anyOf", self.pointer(conj), why)
        return out

    def _add(self, work: Work, place: int, path: tuple[int, ...]) -> None:
        """Adds one schema to the conjunction."""
        node = self.document.nodes[place]
        schema = node.schema
        if isinstance(schema, bool):
            work.shape = work.shape if schema else {}
            return
        shape, choice = own_shape(self.document, place)
        work.shape = intersect_shapes(work.shape, shape)
        if choice is not None:
            work.choices += ((path, choice),)
        for keyword in schema:
            if keyword in ASSERTIONS and keyword not in ANNOTATIONS:
                self._apply(work, keyword, place, path)

    def _apply(self, work: Work, keyword: str, place: int, path: tuple[int, ...]) -> None:
        """Adds what an in-place keyword says."""
        document, schema = self.document, self.document.nodes[place].schema
        pointer = step(document.nodes[place].pointer, keyword)
        value = schema[keyword]  # type: ignore[index]
        match keyword:
            case "$ref":
                work.todo.append((document.target(place), path))
            case "allOf":
                work.todo += [(document.at(place, keyword, at), path) for at in range(len(value))]
            case "anyOf":
                branches: Choice = [(document.at(place, keyword, at),) for at in range(len(value))]
                work.choices += ((path, branches),)
            case "oneOf":
                branches = [(document.at(place, keyword, at),) for at in range(len(value))]
                self._check_disjoint(branches, pointer)
                work.choices += ((path, branches),)
            case "dependentRequired" | "dependentSchemas":
                for name in value:
                    work.choices += ((path, self._dependent(keyword, name, place)),)
            case "not":
                work.todo += [(made, path) for made in self._negated(place, pointer)]
            case "if":
                self._conditional(work, place, path, pointer)
            case "$dynamicRef":
                work.todo.append((dynamic_target(document, place), path))

    def _dependent(self, keyword: str, name: str, place: int) -> Choice:
        """Without the property, or with what it brings along."""
        lacks = self.make({"properties": {name: False}}, place, (keyword, name, "lacks"))
        value = self.document.nodes[place].schema[keyword][name]  # type: ignore[index]
        names = [name, *(value if keyword == "dependentRequired" else ())]
        needs = self.make({"type": "object", "required": names}, place, (keyword, name, "needs"))
        if keyword == "dependentSchemas":
            needs += (self.document.at(place, keyword, name),)
        return [lacks, needs]

    def _negated(self, place: int, pointer: str) -> Conj:
        inner = self.document.nodes[place].schema["not"]  # type: ignore[index]
        if isinstance(inner, dict) and all(keyword in ANNOTATIONS for keyword in inner):
            inner = True
        if isinstance(inner, bool):
            return self.make(not inner, place, "not")
        types = inner.get("type")
        names = [types] if isinstance(types, str) else types
        if not names or "integer" in names or any(k != "type" and k not in ANNOTATIONS for k in inner):
            refuse("not", pointer, "what it excludes cannot be enforced; say what is allowed instead")
        left = [kind for kind in TYPES if kind not in names]
        return self.make({"type": left} if left else False, place, "not")

    def _conditional(self, work: Work, place: int, path: tuple[int, ...], pointer: str) -> None:
        schema = self.document.nodes[place].schema
        branches = [name for name in ("then", "else") if name in schema]  # type: ignore[operator]
        if not branches:
            return
        test = schema["if"]  # type: ignore[index]
        if test == {}:
            test = True
        if not isinstance(test, bool):
            refuse("if", pointer, "a condition cannot be enforced; use anyOf with a property that tells")
        taken = "then" if test else "else"
        if taken in branches:
            work.todo.append((self.document.at(place, taken), path))

    def _check_disjoint(self, branches: list[Conj], pointer: str) -> None:
        all_shapes = [self.of(branch) for branch in branches]
        if sum(map(len, all_shapes)) > MAX_SHAPES:  # before each is compared with each
            refuse("oneOf", pointer, f"its branches come to more than {MAX_SHAPES} alternatives")
        for later, shapes in enumerate(all_shapes):
            for earlier in range(later):
                if not all(disjoint(self.of, a, b) for a in all_shapes[earlier] for b in shapes):
                    why = f"branches {earlier} and {later} may both hold; use anyOf, or a required property"
                    refuse("oneOf", pointer, f"{why} whose const differs")


def parts(piece: object) -> list[Conj]:
    """The schemas of what is inside an array or an object."""
    if isinstance(piece, Array):
        return [*piece.prefix, piece.rest]
    if isinstance(piece, Object):
        return [*piece.properties.values(), *(conj for _, conj in piece.patterns.values()), piece.rest]
    return []
