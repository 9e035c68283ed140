"""Writes shapes as a JSON Schema in the small subset that the grammar engine enforces exactly.

The terms part, place, conjunction, constraint and shape are explained in constraints/json_types.py.
"""

from dataclasses import dataclass, field
from itertools import combinations
from math import comb
from typing import Literal

import msgspec

from mmengine.structured_output.json_pointer import join_pointer
from mmengine.structured_output.json_schema.constraints.json_types import (
    Array,
    Boolean,
    Conjunction,
    Constraint,
    Null,
    Number,
    Object,
    Shape,
    String,
)
from mmengine.structured_output.json_schema.emission.arrays import Json, array_schemas
from mmengine.structured_output.json_schema.emission.bounds import Bounds
from mmengine.structured_output.json_schema.emission.numbers import number_schemas
from mmengine.structured_output.json_schema.patterns.character_sets import PatternError, drops_nul
from mmengine.structured_output.json_schema.patterns.other_keys import OtherKeys
from mmengine.structured_output.json_schema.patterns.pattern import Pattern
from mmengine.structured_output.json_schema.rewriting.key_order import MARK, KeyOrders, list_orders
from mmengine.structured_output.json_schema.rewriting.key_patterns import exclude_names, exclude_patterns
from mmengine.structured_output.json_schema.rewriting.satisfiability import Satisfiable
from mmengine.structured_output.json_schema.vocabulary.keywords import check_multiple, show_value, to_number
from mmengine.structured_output.json_schema.vocabulary.refusal import refuse

# Maximum nesting depth for written schemas, because JSON readers limit the depth. Deeper parts become
# definitions.
MAX_DEPTH = 24
# minProperties and maxProperties are written as a list of allowed property combinations, at most this many.
MAX_COMBINATIONS = 128


@dataclass(slots=True)
class Emitter:
    satisfiable: Satisfiable
    bounds: Bounds
    names: dict[Conjunction, str] = field(default_factory=dict)  # Part -> name of its definition.
    waiting: list[Conjunction] = field(default_factory=list)  # Parts whose definitions must be written.
    written_leaves: dict[Conjunction, Json | Literal[True]] = field(
        default_factory=dict
    )  # Cache of written parts that contain no other part.
    depth: int = 0
    shared: dict[str, Json] = field(default_factory=dict)  # Name -> definition of a number.
    # Whether keys must not contain \u escapes, because the engine excludes keys by their spelling.
    plain_escapes: bool = False
    orders: KeyOrders = field(init=False)

    def __post_init__(self) -> None:
        self.orders = KeyOrders(self.bounds.ordered)

    def schema(self, root: Conjunction) -> Json | Literal[True]:
        """Return the whole schema. Parts that are used at least twice become definitions."""
        uses = dict.fromkeys(self.satisfiable.order, 0)
        uses[root] = 1
        inside = self.satisfiable.inside
        for parts in inside.values():
            for part in parts:
                uses[part] += 1
        for conj, count in uses.items():
            if (
                count > 1
                and inside[conj]
                and conj in self.satisfiable.satisfied
                and not self._is_unrestricted(conj)
            ):
                self._define(conj)
        body = self._part(root)
        definitions: dict[str, Json | bool] = {}
        for conj in self.waiting:  # The list grows during the loop.
            definitions[self.names[conj]] = self._part(conj, top=True)
        self.orders.drop_unsupported()
        if body is True:
            return True
        definitions |= self.shared
        return {**body, "$defs": definitions} if definitions else body

    def _define(self, conj: Conjunction) -> None:
        self.names[conj] = str(len(self.names))
        self.waiting.append(conj)

    def _is_unrestricted(self, conj: Conjunction) -> bool:
        """Return whether the part is written as `true` (any value). Number bounds do not apply to such a
        part, because bounds would enlarge the grammars for most open objects.
        """
        return not conj and not (self.bounds.string or self.bounds.key)

    def _part(self, conj: Conjunction, top: bool = False) -> Json | Literal[True]:
        known = self.written_leaves.get(conj)
        if known is not None:
            return known
        if self._is_unrestricted(conj):
            return True
        if self.depth >= MAX_DEPTH and conj not in self.names:
            self._define(conj)
        if conj in self.names and not top:
            return {"$ref": f"#/$defs/{self.names[conj]}"}
        self.depth += 1
        constraints = [
            constraint
            for shape in merge_values(self.satisfiable.shapes.of(conj))
            for constraint in shape.values()
        ]
        out = [
            schema
            for constraint in constraints
            if self.satisfiable.allows(constraint)
            for schema in self._constraint(constraint, conj)
        ]
        self.depth -= 1
        if len(out) > 1:
            # Remove duplicates. Compare by text, because the order of keys matters.
            out = list({msgspec.json.encode(schema): schema for schema in out}.values())
        written: Json = out[0] if len(out) == 1 else {"anyOf": out}
        if not self.satisfiable.inside[conj]:
            self.written_leaves[conj] = written
        return written

    def _constraint(self, constraint: Constraint, conj: Conjunction) -> list[Json]:
        self._check_blocked(constraint, conj)
        match constraint:
            case Null():
                return [{"type": "null"}]
            case Boolean():
                return (
                    [{"type": "boolean"}]
                    if len(constraint.values) == 2
                    else [{"enum": sorted(constraint.values)}]
                )
            case Number():
                pointer = self.satisfiable.shapes.pointer(conj)
                if constraint.multiple:
                    check_multiple(to_number(constraint.multiple), join_pointer(pointer, "multipleOf"))
                return self._numbers(constraint, pointer)
            case String():
                return [self._string(constraint)]
            case Array():
                return array_schemas(constraint, conj, self.satisfiable, self._part)
            case Object():
                return self._objects(constraint, conj)
        raise TypeError(f"{constraint} is not a constraint")

    def _numbers(self, constraint: Number, pointer: str) -> list[Json]:
        """Return schemas for a number. Numbers without limits share a definition, which is compiled once."""
        name = "integer" if constraint.integer else "number"
        notes = self.satisfiable.shapes.document.narrowings
        if constraint != Number(constraint.integer):
            return number_schemas(constraint, self.bounds, notes, pointer)
        if name not in self.shared:
            ways = number_schemas(constraint, self.bounds, notes, pointer)
            self.shared[name] = ways[0] if len(ways) == 1 else {"anyOf": ways}
        return [{"$ref": f"#/$defs/{name}"}]

    def _check_blocked(self, constraint: Constraint, conj: Conjunction) -> None:
        blocked = getattr(constraint, "blocked", ())
        if blocked:
            keyword, pointer, why = blocked[0]
            refuse(keyword, pointer or self.satisfiable.shapes.pointer(conj), why)

    def _string(self, constraint: String) -> Json:
        out: Json = {"type": "string"}
        high = constraint.high
        if high is None and self.bounds.string:
            high = max(self.bounds.string, constraint.low)
        low, patterns = constraint.low, list(constraint.patterns)
        if constraint.values is not None:
            out["enum"] = list(constraint.values)
        else:
            if len(patterns) == 1:
                patterns[0], low, high = patterns[0].with_length(low, high)
            if low:
                out["minLength"] = low
            if high is not None:
                out["maxLength"] = high
        if patterns:
            out["pattern"] = whole_pattern(patterns[0])
        if len(patterns) > 1:
            out["allOf"] = [{"type": "string", "pattern": whole_pattern(pattern)} for pattern in patterns[1:]]
        return out

    def _objects(self, constraint: Object, conj: Conjunction) -> list[Json]:
        """Return schemas for an object: several if only some key orders are allowed."""
        pointer = self.satisfiable.shapes.pointer(conj)
        names = dict.fromkeys((*constraint.properties, *constraint.required))
        can = [name for name in names if constraint.property(name) in self.satisfiable.satisfied]
        is_open = self.satisfiable.is_open(constraint)
        most = constraint.high is not None and (is_open or constraint.high < len(can))
        kind = constraint, can, is_open, most or constraint.low > len(constraint.required)
        if self.orders.is_unordered(*kind):
            out = self._object(constraint, conj, can, constraint.required)
            out[MARK] = True
            self.orders.marked.append(out)
            return [out]
        self.orders.add_note(*kind, pointer)
        there = frozenset(can)
        return [
            schema
            for each in list_orders(constraint)
            for schema in self._in_order(each, conj, there, is_open)
        ]

    def _in_order(
        self, constraint: Object, conj: Conjunction, there: frozenset[str], is_open: bool
    ) -> list[Json]:
        """Return schemas for an object with a fixed key order: several if minProperties or maxProperties
        leave a choice between named properties.
        """
        pointer = self.satisfiable.shapes.pointer(conj)
        can = [
            name for name in dict.fromkeys((*constraint.properties, *constraint.required)) if name in there
        ]
        required = frozenset(constraint.required)
        optional = [name for name in can if name not in required]
        low = max(
            0, constraint.low - len(constraint.required)
        )  # Minimum number of properties beyond the required ones.
        high = None if constraint.high is None else constraint.high - len(constraint.required)
        if is_open and low > 1:
            why = "unnamed keys may be repeated, so more than one cannot be counted"
            refuse("minProperties", join_pointer(pointer, "minProperties"), why)
        if not is_open and high is not None and high >= len(optional):
            high = None
        if not low and high is None:
            return [self._object(constraint, conj, can, constraint.required)]
        if is_open and high is None:
            one = [self._object(constraint, conj, can, (*constraint.required, name)) for name in optional]
            bare = self._object(constraint, conj, list(constraint.required), constraint.required)
            return [*one, {**bare, "minProperties": constraint.low}]
        least = 0 if is_open else low
        sizes = range(least, least + 1) if high is None else range(least, min(high, len(optional)) + 1)
        if sum(comb(len(optional), size) for size in sizes) > MAX_COMBINATIONS:
            keyword = "minProperties" if high is None else "maxProperties"
            why = f"it leaves more than {MAX_COMBINATIONS} combinations of optional properties"
            refuse(keyword, join_pointer(pointer, keyword), why)
        out = []
        for size in sizes:
            for chosen in combinations(optional, size):
                needed = (*constraint.required, *chosen)
                rest = can if high is None else [name for name in can if name in needed]
                counted: Json = {"maxProperties": constraint.high} if is_open else {}
                counted |= {"minProperties": constraint.low} if is_open and low > size else {}
                out.append({**self._object(constraint, conj, rest, needed), **counted})
        return out

    def _object(
        self, constraint: Object, conj: Conjunction, names: list[str], required: tuple[str, ...]
    ) -> Json:
        """Return an object's schema that allows only `names` among the named properties."""
        yes = self.satisfiable.satisfied
        out: Json = {"type": "object"}
        properties: dict[str, Json | bool] = {name: self._part(constraint.property(name)) for name in names}
        taken = list(dict.fromkeys((*constraint.properties, *constraint.required)))
        self._check_prefixes(constraint, conj)
        patterns: dict[str, Json | bool] = {
            regex: self._part(part)
            for p, part in constraint.patterns.values()
            if part in yes and (regex := self._exclude_named(p, part, taken)) is not None
        }
        prefixes = [pattern.prefix for pattern, _ in constraint.patterns.values()]
        others: OtherKeys | None = None
        out["additionalProperties"] = False
        if constraint.rest in yes and None not in prefixes:
            known = [prefix for prefix in prefixes if prefix is not None]
            others = OtherKeys(tuple(taken), tuple(known), self.bounds.key)
        elif constraint.rest in yes and any(drops_nul(p.regex) for p, _ in constraint.patterns.values()):
            patterns |= self._other_keys(constraint, conj, taken)
            self.plain_escapes = True
        elif constraint.rest in yes:
            out["additionalProperties"] = self._part(constraint.rest)
            self.plain_escapes = True
        if None in prefixes and (patterns or constraint.rest in yes):
            patterns |= {
                whole_pattern(p): False for p, part in constraint.patterns.values() if part not in yes
            }
            # The engine's error for a key that may match two patterns needs this pointer.
            if len(patterns) > 1:
                out["$comment"] = f"#{self._pattern_pointer(constraint, conj)}"
        if patterns or others:
            properties |= {name: False for name in taken if name not in properties}
        if properties:
            out["properties"] = properties
        if required:
            out["required"] = list(required)
        if others is not None:
            out = others.apply_to(out, patterns, self._part(constraint.rest))
        elif patterns:
            out["patternProperties"] = patterns
        if patterns or others:
            self.orders.patterned.append((out, self._pattern_pointer(constraint, conj)))
        return out

    def _exclude_named(self, pattern: Pattern, part: Conjunction, names: list[str]) -> str | None:
        """Return the pattern without the named properties, whose schemas already include the pattern's
        schema. If the names cannot be excluded, returns the whole pattern. Returns None if no key is left.
        """
        if not part or pattern.budget is None:
            return whole_pattern(pattern)
        try:
            left = exclude_names(pattern.regex, names, pattern.budget)
        except PatternError:
            return whole_pattern(pattern)
        return None if left is None else f"^(?:{left})$"

    def _other_keys(self, constraint: Object, conj: Conjunction, names: list[str]) -> dict[str, Json | bool]:
        """Return {regex: schema} for keys that match no pattern, or {} if there are no such keys. The regex
        replaces `additionalProperties` if a pattern was written without U+0000 (`drops_nul`). The grammar
        engine would apply `additionalProperties` also to keys with U+0000 that match the original pattern.
        """
        budget = self.satisfiable.shapes.document.budget
        try:
            left = exclude_patterns([pattern.regex for pattern, _ in constraint.patterns.values()], budget)
        except PatternError as error:
            why = f"the keys that match no pattern, U+0000 included, cannot be computed: {error}"
            refuse("patternProperties", self._pattern_pointer(constraint, conj), why)
        regex = (
            None
            if left is None
            else self._exclude_named(Pattern(left, None, budget=budget), constraint.rest, names)
        )
        return {} if regex is None else {regex: self._part(constraint.rest)}

    def _check_prefixes(self, constraint: Object, conj: Conjunction) -> None:
        """Refuse overlapping prefixes, because a key may match only a single pattern. The grammar engine
        reports other overlaps.
        """
        yes = self.satisfiable.satisfied
        found = [
            (p.prefix, text, part) for text, (p, part) in constraint.patterns.items() if p.prefix is not None
        ]
        # Stack of nested prefixes: (prefix, its pattern, innermost pattern so far that allows keys, or None).
        outer: list[tuple[str, str, str | None]] = []
        for prefix, text, part in sorted(found):
            while outer and not prefix.startswith(outer[-1][0]):
                outer.pop()
            allowing = outer[-1][2] if outer else None
            other = allowing if part not in yes else outer[-1][1] if outer else None
            if other is not None:
                name = show_value(other)
                why = f"a key may match {name} too, which cannot be enforced; let no key match both"
                refuse("patternProperties", self._pattern_pointer(constraint, conj, text), why)
            outer.append((prefix, text, text if part in yes else allowing))

    def _pattern_pointer(self, constraint: Object, conj: Conjunction, text: str | None = None) -> str:
        """Return the JSON pointer to a pattern, or to an object's patternProperties."""
        nodes = self.satisfiable.shapes.document.nodes
        for name in constraint.patterns if text is None else [text]:
            tail = join_pointer("", "patternProperties", name)
            for place in constraint.patterns[name][1]:
                if nodes[place].pointer.endswith(tail):
                    pointer = nodes[place].pointer
                    return pointer.removesuffix(join_pointer("", name)) if text is None else pointer
        return join_pointer(self.satisfiable.shapes.pointer(conj), "patternProperties")


def whole_pattern(pattern: Pattern) -> str:
    return f"^(?:{pattern.regex})$"


def merge_values(shapes: list[Shape]) -> list[Shape]:
    """Merge shapes that only list values, if their types and string patterns are equal."""
    if len(shapes) == 1:
        return shapes
    out: list[Shape] = []
    # String patterns (None for numbers) -> (index in `out`, values).
    found: dict[object, tuple[int, tuple]] = {}
    for shape in shapes:
        (kind, constraint), *more = shape.items()
        if more or not isinstance(constraint, Number | String) or constraint.values is None:
            out.append(shape)
            continue
        key = constraint.patterns if isinstance(constraint, String) else None
        if key not in found:
            found[key] = len(out), constraint.values
            out.append(shape)
            continue
        at, values = found[key]
        joined = tuple(dict.fromkeys((*values, *constraint.values)))
        found[key] = at, joined
        out[at] = {kind: _of_values(constraint, joined)}
    return out


def _of_values(constraint: Number | String, values: tuple) -> Constraint:
    if isinstance(constraint, String):
        return String(values=values, patterns=constraint.patterns, blocked=constraint.blocked)
    return Number(values=values)
