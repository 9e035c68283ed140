"""Which parts of a schema some finite value satisfies, and why the others have none.

A least fixed point: a part is satisfiable once a shape of it needs only parts that are. What only
recursion could fill is never reached, so "recursion without a base" needs no rule of its own.
"""

from dataclasses import dataclass, field

from mmengine.structured_output.json_schema.constraints.item_automata import Sequence, sequence_of
from mmengine.structured_output.json_schema.constraints.json_types import Array, Conj, Object, Piece
from mmengine.structured_output.json_schema.rewriting.shapes import Shapes, parts
from mmengine.structured_output.json_schema.vocabulary.keywords import contradiction
from mmengine.structured_output.json_schema.vocabulary.refusal import refuse, step


@dataclass(slots=True)
class Satisfiable:
    shapes: Shapes
    order: list[Conj] = field(default_factory=list)  # every part that can be reached, the root first
    inside: dict[Conj, list[Conj]] = field(default_factory=dict)  # the parts inside each, once for each use
    yes: set[Conj] = field(default_factory=set)
    sequences: dict[Array, Sequence] = field(default_factory=dict)  # of arrays whose items count together

    def work_out(self, root: Conj) -> None:
        """Fills `order` and `yes`; refuses a root that nothing satisfies, or a blocked piece."""
        found = {root: None}
        self.order = [root]
        for conj in self.order:  # which grows
            inside = self.inside[conj] = []
            for shape in self.shapes.of(conj):
                for piece in shape.values():
                    if isinstance(piece, Array | Object):
                        inside += self._parts(piece, conj)
                    else:
                        self.yes.add(conj)
            for part in inside:
                if part not in found:
                    found[part] = None
                    self.order.append(part)
        left = [conj for conj in reversed(self.order) if conj not in self.yes]
        grown = True
        while grown:
            before, left = left, [conj for conj in left if not self._now(conj)]
            grown = len(left) < len(before)
        if root not in self.yes:
            self._explain(root, frozenset())

    def _now(self, conj: Conj) -> bool:
        """Whether the part is satisfiable by what is known to be, which it then is too."""
        for shape in self.shapes.of(conj):
            for piece in shape.values():
                if self.piece(piece):
                    self.yes.add(conj)
                    return True
        return False

    def _parts(self, piece: Piece, conj: Conj) -> list[Conj]:
        if isinstance(piece, Array) and piece.counts_together() and piece not in self.sequences:

            def make(schema: dict | bool, key: object) -> Conj:
                return self.shapes.make(schema, conj[0], key)

            found = sequence_of(piece, self.shapes.of, make, self.shapes.complement)
            self.sequences[piece] = found
        return self.parts(piece)

    def parts(self, piece: Piece) -> list[Conj]:
        """The schemas of what is inside an array or an object, each a part of `order`."""
        if isinstance(piece, Array) and piece.counts_together():
            return self.sequences[piece].parts()
        return parts(piece)

    def piece(self, piece: Piece) -> bool:
        if not isinstance(piece, Array | Object):
            return True
        if isinstance(piece, Array) and piece.counts_together():
            return self.sequences[piece].useful(self.yes) is not None
        if isinstance(piece, Array):
            needed = [piece.item(at) for at in range(min(piece.low, len(piece.prefix) + 1))]
            return all(part in self.yes for part in needed)
        if not all(piece.property(name) in self.yes for name in piece.required):
            return False
        least = max(piece.low, len(piece.required))
        if piece.high is not None and least > piece.high:
            return False
        return not piece.low or self.open(piece) or least <= self.most(piece)

    def open(self, piece: Object) -> bool:
        """Whether an object may have keys that the schema does not name."""
        yes = self.yes
        return piece.rest in yes or any(conj in yes for _, conj in piece.patterns.values())

    def most(self, piece: Object) -> int:
        names = dict.fromkeys((*piece.properties, *piece.required))
        return sum(piece.property(name) in self.yes for name in names)

    def _explain(self, conj: Conj, seen: frozenset[Conj]) -> None:
        pointer = self.shapes.pointer(conj)
        if conj in seen:
            refuse("$ref", pointer, "it recurses without a base: only an endless value could satisfy it")
        shapes = self.shapes.of(conj)
        self._explain_places(conj)
        if not shapes:
            schema = self.shapes.document.nodes[conj[0]].schema if conj else True
            why = (
                "the schema false allows nothing"
                if schema is False
                else "what it asks for contradicts itself"
            )
            refuse("", pointer, why)
        for shape in shapes:
            for piece in shape.values():
                if isinstance(piece, Array) and piece.counts_together():
                    self._explain_sequence(piece, conj)
                elif isinstance(piece, Array):
                    for at in range(min(piece.low, len(piece.prefix) + 1)):
                        if piece.item(at) not in self.yes:
                            self._explain(piece.item(at), seen | {conj})
                if isinstance(piece, Object):
                    self._explain_object(piece, conj, seen)
        refuse("", pointer, "nothing satisfies it")

    def _explain_sequence(self, piece: Array, conj: Conj) -> None:
        pointer = piece.contains[0].pointer if piece.contains else piece.unique or self.shapes.pointer(conj)
        keyword = "contains" if piece.contains else "uniqueItems"
        refuse(keyword, pointer, "no array has items enough that satisfy it")

    def _explain_places(self, conj: Conj) -> None:
        """Refuses for what two keywords of one schema say, if that is the reason."""
        for node in (self.shapes.document.nodes[place] for place in conj):
            found = contradiction(node.schema) if isinstance(node.schema, dict) else None
            if found:
                names, why = found
                refuse(str(names[0]), step(node.pointer, *names), why)

    def _explain_object(self, piece: Object, conj: Conj, seen: frozenset[Conj]) -> None:
        pointer = self.shapes.pointer(conj)
        for name in piece.required:
            part = piece.property(name)
            if part not in self.yes and name not in piece.properties:
                refuse("required", step(pointer, "required"), f'"{name}" is required but not allowed')
            if part not in self.yes:
                self._explain(part, seen | {conj})
        if piece.high is not None and len(piece.required) > piece.high:
            why = f"{piece.high} properties at most, and {len(piece.required)} are required"
            refuse("maxProperties", step(pointer, "maxProperties"), why)
        why = f"{piece.low} properties at least, and only {self.most(piece)} are allowed"
        refuse("minProperties", step(pointer, "minProperties"), why)
