"""Worked-out shapes written as the small part of JSON Schema that the grammar engine enforces exactly."""

from dataclasses import dataclass, field
from itertools import combinations
from math import comb
from typing import Literal

import msgspec

from mmengine.structured_output.json_schema.constraints.json_types import (
    Array,
    Boolean,
    Conj,
    Null,
    Number,
    Object,
    Piece,
    Shape,
    String,
)
from mmengine.structured_output.json_schema.emission.arrays import Json, array_schemas
from mmengine.structured_output.json_schema.emission.bounds import Bounds
from mmengine.structured_output.json_schema.emission.numbers import number_schemas
from mmengine.structured_output.json_schema.patterns.character_sets import PatternError, gives_up_nul
from mmengine.structured_output.json_schema.patterns.other_keys import OtherKeys
from mmengine.structured_output.json_schema.patterns.pattern import Pattern
from mmengine.structured_output.json_schema.rewriting.key_order import MARK, Orders, arrangements
from mmengine.structured_output.json_schema.rewriting.key_patterns import but_none, without_names
from mmengine.structured_output.json_schema.rewriting.satisfiability import Satisfiable
from mmengine.structured_output.json_schema.vocabulary.keywords import check_multiple, shown, to_number
from mmengine.structured_output.json_schema.vocabulary.refusal import refuse, step

MAX_DEPTH = 24  # of parts written inside one another: what reads JSON has a limit too
MAX_COMBINATIONS = 128  # of optional properties, for minProperties and maxProperties


@dataclass(slots=True)
class Emitter:
    satisfiable: Satisfiable
    bounds: Bounds
    names: dict[Conj, str] = field(default_factory=dict)  # of parts that are definitions
    waiting: list[Conj] = field(default_factory=list)  # definitions that are not written yet
    leaves: dict[Conj, Json | Literal[True]] = field(default_factory=dict)  # parts with none inside, written
    depth: int = 0
    shared: dict[str, Json] = field(default_factory=dict)  # definitions of numbers, by name
    plain_escapes: bool = False  # keys are excluded by spelling, so \\u must not be one
    orders: Orders = field(init=False)

    def __post_init__(self) -> None:
        self.orders = Orders(self.bounds.ordered)

    def schema(self, root: Conj) -> Json | Literal[True]:
        """The whole schema. Parts that are used twice, and so every recursive one, become definitions."""
        uses = dict.fromkeys(self.satisfiable.order, 0)
        uses[root] = 1
        inside = self.satisfiable.inside
        for parts in inside.values():
            for part in parts:
                uses[part] += 1
        for conj, count in uses.items():
            if count > 1 and inside[conj] and conj in self.satisfiable.yes and not self._free(conj):
                self._define(conj)
        body = self._part(root)
        definitions: dict[str, Json | bool] = {}
        for conj in self.waiting:  # which grows
            definitions[self.names[conj]] = self._part(conj, top=True)
        self.orders.settle()
        if body is True:
            return True
        definitions |= self.shared
        return {**body, "$defs": definitions} if definitions else body

    def _define(self, conj: Conj) -> None:
        self.names[conj] = str(len(self.names))
        self.waiting.append(conj)

    def _free(self, conj: Conj) -> bool:
        """Whether the part is anything at all, and written so: its numbers are not bounded, for that would
        make a large grammar of almost every schema with an open object."""
        return not conj and not (self.bounds.string or self.bounds.key)

    def _part(self, conj: Conj, top: bool = False) -> Json | Literal[True]:
        known = self.leaves.get(conj)
        if known is not None:
            return known
        if self._free(conj):
            return True
        if self.depth >= MAX_DEPTH and conj not in self.names:
            self._define(conj)
        if conj in self.names and not top:
            return {"$ref": f"#/$defs/{self.names[conj]}"}
        self.depth += 1
        pieces = [piece for shape in merged(self.satisfiable.shapes.of(conj)) for piece in shape.values()]
        out = [
            schema for piece in pieces if self.satisfiable.piece(piece) for schema in self._piece(piece, conj)
        ]
        self.depth -= 1
        if len(out) > 1:
            # By their texts, as orders of keys differ.
            out = list({msgspec.json.encode(schema): schema for schema in out}.values())
        written: Json = out[0] if len(out) == 1 else {"anyOf": out}
        if not self.satisfiable.inside[conj]:
            self.leaves[conj] = written
        return written

    def _piece(self, piece: Piece, conj: Conj) -> list[Json]:
        self._check_blocked(piece, conj)
        match piece:
            case Null():
                return [{"type": "null"}]
            case Boolean():
                return [{"type": "boolean"}] if len(piece.values) == 2 else [{"enum": sorted(piece.values)}]
            case Number():
                pointer = self.satisfiable.shapes.pointer(conj)
                if piece.multiple:
                    check_multiple(to_number(piece.multiple), step(pointer, "multipleOf"))
                return self._numbers(piece, pointer)
            case String():
                return [self._string(piece)]
            case Array():
                return array_schemas(piece, conj, self.satisfiable, self._part)
            case Object():
                return self._objects(piece, conj)
        raise TypeError(f"{piece} is no piece")

    def _numbers(self, piece: Number, pointer: str) -> list[Json]:
        """Those that at most our bounds restrict are one definition, which is compiled once."""
        name = "integer" if piece.integer else "number"
        notes = self.satisfiable.shapes.document.narrower
        if piece != Number(piece.integer):
            return number_schemas(piece, self.bounds, notes, pointer)
        if name not in self.shared:
            ways = number_schemas(piece, self.bounds, notes, pointer)
            self.shared[name] = ways[0] if len(ways) == 1 else {"anyOf": ways}
        return [{"$ref": f"#/$defs/{name}"}]

    def _check_blocked(self, piece: Piece, conj: Conj) -> None:
        blocked = getattr(piece, "blocked", ())
        if blocked:
            keyword, pointer, why = blocked[0]
            refuse(keyword, pointer or self.satisfiable.shapes.pointer(conj), why)

    def _string(self, piece: String) -> Json:
        out: Json = {"type": "string"}
        high = piece.high
        if high is None and self.bounds.string:
            high = max(self.bounds.string, piece.low)
        low, patterns = piece.low, list(piece.patterns)
        if piece.values is not None:
            out["enum"] = list(piece.values)
        else:
            if len(patterns) == 1:
                patterns[0], low, high = patterns[0].of_length(low, high)
            if low:
                out["minLength"] = low
            if high is not None:
                out["maxLength"] = high
        if patterns:
            out["pattern"] = whole(patterns[0])
        if len(patterns) > 1:
            out["allOf"] = [{"type": "string", "pattern": whole(pattern)} for pattern in patterns[1:]]
        return out

    def _objects(self, piece: Object, conj: Conj) -> list[Json]:
        """Usually one; several where its keys come in some orders, but not in any."""
        pointer = self.satisfiable.shapes.pointer(conj)
        names = dict.fromkeys((*piece.properties, *piece.required))
        can = [name for name in names if piece.property(name) in self.satisfiable.yes]
        is_open = self.satisfiable.open(piece)
        most = piece.high is not None and (is_open or piece.high < len(can))
        kind = piece, can, is_open, most or piece.low > len(piece.required)
        if self.orders.any(*kind):
            out = self._object(piece, conj, can, piece.required)
            out[MARK] = True
            self.orders.marked.append(out)
            return [out]
        self.orders.say(*kind, pointer)
        there = frozenset(can)
        return [
            schema for each in arrangements(piece) for schema in self._in_order(each, conj, there, is_open)
        ]

    def _in_order(self, piece: Object, conj: Conj, there: frozenset[str], is_open: bool) -> list[Json]:
        """Usually one; several where minProperties or maxProperties leaves a choice of named ones."""
        pointer = self.satisfiable.shapes.pointer(conj)
        can = [name for name in dict.fromkeys((*piece.properties, *piece.required)) if name in there]
        required = frozenset(piece.required)
        optional = [name for name in can if name not in required]
        low = max(0, piece.low - len(piece.required))  # how many more than the required ones
        high = None if piece.high is None else piece.high - len(piece.required)
        if is_open and low > 1:
            why = "keys that the schema does not name may be repeated, so more of them cannot be counted"
            refuse("minProperties", step(pointer, "minProperties"), why)
        if not is_open and high is not None and high >= len(optional):
            high = None
        if not low and high is None:
            return [self._object(piece, conj, can, piece.required)]
        if is_open and high is None:
            one = [self._object(piece, conj, can, (*piece.required, name)) for name in optional]
            bare = self._object(piece, conj, list(piece.required), piece.required)
            return [*one, {**bare, "minProperties": piece.low}]
        least = 0 if is_open else low
        sizes = range(least, least + 1) if high is None else range(least, min(high, len(optional)) + 1)
        if sum(comb(len(optional), size) for size in sizes) > MAX_COMBINATIONS:
            keyword = "minProperties" if high is None else "maxProperties"
            why = f"it leaves more than {MAX_COMBINATIONS} combinations of optional properties"
            refuse(keyword, step(pointer, keyword), why)
        out = []
        for size in sizes:
            for chosen in combinations(optional, size):
                needed = (*piece.required, *chosen)
                rest = can if high is None else [name for name in can if name in needed]
                counted: Json = {"maxProperties": piece.high} if is_open else {}
                counted |= {"minProperties": piece.low} if is_open and low > size else {}
                out.append({**self._object(piece, conj, rest, needed), **counted})
        return out

    def _object(self, piece: Object, conj: Conj, names: list[str], required: tuple[str, ...]) -> Json:
        """`names`: the properties that may be there; any other named one may not."""
        yes = self.satisfiable.yes
        out: Json = {"type": "object"}
        properties: dict[str, Json | bool] = {name: self._part(piece.property(name)) for name in names}
        taken = list(dict.fromkeys((*piece.properties, *piece.required)))
        self._check_prefixes(piece, conj)
        patterns: dict[str, Json | bool] = {
            regex: self._part(part)
            for p, part in piece.patterns.values()
            if part in yes and (regex := self._but(p, part, taken)) is not None
        }
        prefixes = [pattern.prefix for pattern, _ in piece.patterns.values()]
        others: OtherKeys | None = None
        out["additionalProperties"] = False
        if piece.rest in yes and None not in prefixes:
            known = [prefix for prefix in prefixes if prefix is not None]
            others = OtherKeys(tuple(taken), tuple(known), self.bounds.key)
        elif piece.rest in yes and any(gives_up_nul(p.regex) for p, _ in piece.patterns.values()):
            patterns |= self._rest(piece, conj, taken)
            self.plain_escapes = True
        elif piece.rest in yes:
            out["additionalProperties"] = self._part(piece.rest)
            self.plain_escapes = True
        if None in prefixes and (patterns or piece.rest in yes):
            patterns |= {whole(p): False for p, part in piece.patterns.values() if part not in yes}
            if len(patterns) > 1:  # the grammar engine refuses those that a key may match together
                out["$comment"] = f"#{self._pattern_pointer(piece, conj)}"
        if patterns or others:
            properties |= {name: False for name in taken if name not in properties}
        if properties:
            out["properties"] = properties
        if required:
            out["required"] = list(required)
        if others is not None:
            out = others.written(out, patterns, self._part(piece.rest))
        elif patterns:
            out["patternProperties"] = patterns
        if patterns or others:
            self.orders.patterned.append((out, self._pattern_pointer(piece, conj)))
        return out

    def _but(self, pattern: Pattern, part: Conj, names: list[str]) -> str | None:
        """The pattern without named properties. Their schemas say what the pattern does, and to say it
        twice would lead the grammar engine deep into both."""
        if not part or pattern.budget is None:
            return whole(pattern)
        try:
            left = without_names(pattern.regex, names, pattern.budget)
        except PatternError:
            return whole(pattern)
        return None if left is None else f"^(?:{left})$"

    def _rest(self, piece: Object, conj: Conj, names: list[str]) -> dict[str, Json | bool]:
        """All other keys, where the grammar engine would count keys with U+0000 among them that
        a pattern stands for."""
        budget = self.satisfiable.shapes.document.budget
        try:
            left = but_none([pattern.regex for pattern, _ in piece.patterns.values()], budget)
        except PatternError as error:
            why = f"which other keys match none, U+0000 in them included, cannot be told: {error}"
            refuse("patternProperties", self._pattern_pointer(piece, conj), why)
        regex = None if left is None else self._but(Pattern(left, None, budget=budget), piece.rest, names)
        return {} if regex is None else {regex: self._part(piece.rest)}

    def _check_prefixes(self, piece: Object, conj: Conj) -> None:
        """What starts with the longer prefix matches both. Of other patterns the grammar engine says it."""
        yes = self.satisfiable.yes
        found = [(p.prefix, text, part) for text, (p, part) in piece.patterns.items() if p.prefix is not None]
        outer: list[
            tuple[str, str, str | None]
        ] = []  # prefix, its pattern, a pattern up to it that allows keys
        for prefix, text, part in sorted(found):
            while outer and not prefix.startswith(outer[-1][0]):
                outer.pop()
            allowing = outer[-1][2] if outer else None
            other = allowing if part not in yes else outer[-1][1] if outer else None
            if other is not None:
                why = f"a key may match {shown(other)} too, which cannot be enforced; let no key match both"
                refuse("patternProperties", self._pattern_pointer(piece, conj, text), why)
            outer.append((prefix, text, text if part in yes else allowing))

    def _pattern_pointer(self, piece: Object, conj: Conj, text: str | None = None) -> str:
        """To a pattern, or to the patternProperties of an object."""
        nodes = self.satisfiable.shapes.document.nodes
        for name in piece.patterns if text is None else [text]:
            tail = step("", "patternProperties", name)
            for place in piece.patterns[name][1]:
                if nodes[place].pointer.endswith(tail):
                    pointer = nodes[place].pointer
                    return pointer.removesuffix(step("", name)) if text is None else pointer
        return step(self.satisfiable.shapes.pointer(conj), "patternProperties")


def whole(pattern: Pattern) -> str:
    return f"^(?:{pattern.regex})$"


def merged(shapes: list[Shape]) -> list[Shape]:
    """Alternatives that are only values of one type become one list of values."""
    if len(shapes) == 1:
        return shapes
    out: list[Shape] = []
    found: dict[object, tuple[int, tuple]] = {}  # places in `out` and values, by patterns; None: of numbers
    for shape in shapes:
        (kind, piece), *more = shape.items()
        if more or not isinstance(piece, Number | String) or piece.values is None:
            out.append(shape)
            continue
        key = piece.patterns if isinstance(piece, String) else None
        if key not in found:
            found[key] = len(out), piece.values
            out.append(shape)
            continue
        at, values = found[key]
        joined = tuple(dict.fromkeys((*values, *piece.values)))
        found[key] = at, joined
        out[at] = {kind: _of_values(piece, joined)}
    return out


def _of_values(piece: Number | String, values: tuple) -> Piece:
    if isinstance(piece, String):
        return String(values=values, patterns=piece.patterns, blocked=piece.blocked)
    return Number(values=values)
