"""Finds the subschemas that cannot be enforced. anyOf and oneOf can leave out branches that need them.

If a branch of anyOf is left out, the grammar only allows fewer values. If a branch of oneOf is left out, all
other branches must still exclude the missing branch's values. This exclusion uses a wider schema: the branch
without the parts that cannot be enforced.

The terms part, place, conjunction, constraint and shape are explained in constraints/json_types.py.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from mmengine.structured_output.json_schema.constraints.json_types import Conjunction
from mmengine.structured_output.json_schema.reading.document import Document, Node
from mmengine.structured_output.json_schema.vocabulary.refusal import SchemaRefused, UnenforceablePart

# A pattern without these constructs never raises UnenforceablePart.
_SUSPECT = re.compile(r"\(\?[=!<]|\\[bBk0-9]")
_UNUSED = (
    "$defs",
    "definitions",
)  # Schemas below these keywords have an effect only if a reference leads to them.
_CHOICES = ("anyOf", "oneOf")
# Keywords that are copied into a wider schema.
_KEPT = frozenset(
    ("type", "enum", "const", "required", "minLength", "maxLength", "minItems", "maxItems")
    + ("minProperties", "maxProperties", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
)
MAX_WIDER = 2_000  # Maximum number of subschemas in a wider schema. All further subschemas allow anything.

Choice = list[Conjunction]


@dataclass(slots=True)
class Enforceability:
    """Finds the subschemas in a document that cannot be enforced.

    `build` computes the shape for a place's own keywords, and raises UnenforceablePart if this is impossible.
    """

    document: Document
    build: Callable[[int], object]
    found: dict[int, UnenforceablePart] | None = None
    wider_places: dict[int, int] = field(default_factory=dict)

    def refusal(self, conj: Conjunction) -> UnenforceablePart | None:
        """Return the reason why the conjunction cannot be enforced, or None."""
        if self.found is None:
            self.found = self._search()
        return next((self.found[place] for place in conj if place in self.found), None)

    def branches(self, choice: Choice, keyword: str, pointer: str) -> Choice:
        """Return the branches that can be enforced, and add a note for each branch that is left out.

        If no branch can be enforced, raises the first branch's refusal. `keyword` is anyOf or oneOf, and
        `pointer` is its JSON pointer.
        """
        refusals = [self.refusal(branch) for branch in choice]
        kept = [branch for branch, error in zip(choice, refusals, strict=True) if error is None]
        for error in filter(None, refusals):
            if not kept:
                raise error
            text = f"the branch is left out: {error.keyword} at {error.pointer} cannot be enforced"
            self.document.narrowings.add(keyword, pointer, text)
        return kept

    def wider(self, conj: Conjunction) -> Conjunction:
        """Return a schema without the parts of `conj` that cannot be enforced.

        The schema allows every value that `conj` allows.
        """
        return tuple(self._wider_place(place) for place in conj)

    def _search(self) -> dict[int, UnenforceablePart]:
        nodes = self.document.nodes
        found: dict[int, UnenforceablePart] = {}
        for place, node in enumerate(nodes):
            if any(map(_SUSPECT.search, _patterns(node))):
                try:
                    self.build(place)
                except UnenforceablePart as error:
                    found[place] = error
                except SchemaRefused:
                    pass  # The error is reported if the place is used.
        if not found:
            return found
        users = self._users()
        waiting = list(found)
        while waiting:
            place = waiting.pop()
            for user, keyword in users[place]:
                if user not in found and not (keyword in _CHOICES and self._has_branch(user, keyword, found)):
                    found[user] = found[place]
                    waiting.append(user)
        return found

    def _users(self) -> dict[int, list[tuple[int, str]]]:
        """Return the pairs (user, keyword) for each place. A user is a place whose keyword leads to this
        place.
        """
        users: dict[int, list[tuple[int, str]]] = defaultdict(list)
        for place, node in enumerate(self.document.nodes):
            for names, child in node.children.items():
                if names[0] not in _UNUSED:
                    users[child].append((place, str(names[0])))
            target = self._target(place)
            if target is not None:
                users[target].append((place, "$ref"))
        return users

    def _target(self, place: int) -> int | None:
        schema = self.document.nodes[place].schema
        if not isinstance(schema, dict) or "$ref" not in schema:
            return None
        try:
            return self.document.target(place)
        except SchemaRefused:
            return None

    def _has_branch(self, place: int, keyword: str, found: dict[int, UnenforceablePart]) -> bool:
        """Return whether some branch of the place's anyOf or oneOf can be enforced."""
        children = self.document.nodes[place].children.items()
        return any(child not in found for names, child in children if names[0] == keyword)

    def _wider_place(self, place: int) -> int:
        if place not in self.wider_places:
            pointer = self.document.nodes[place].pointer
            schema = _Widening(self).schema(place, ())
            self.wider_places[place] = self.document.make(schema, pointer, ("wider", place))
        return self.wider_places[place]


@dataclass(slots=True)
class _Widening:
    """Writes a wider schema with at most MAX_WIDER subschemas."""

    within: Enforceability
    count: int = 0

    def schema(self, place: int, path: tuple[int, ...]) -> dict | bool:
        """Return a schema that allows every value which the schema at `place` allows.

        `path` has the places that are being written, to detect recursion.
        """
        self.count += 1
        document = self.within.document
        node = document.nodes[place]
        if isinstance(node.schema, bool):
            return node.schema
        if place in path or self.count > MAX_WIDER:
            return True
        path = (*path, place)
        out: dict = {keyword: value for keyword, value in node.schema.items() if keyword in _KEPT}
        parts = {names: self.schema(child, path) for names, child in _widened(node)}
        has_patterns = "patternProperties" in node.schema
        properties = {names[1]: part for names, part in parts.items() if names[0] == "properties"}
        if properties:
            out["properties"] = properties
        if "additionalProperties" in node.schema and not has_patterns:
            out["additionalProperties"] = parts["additionalProperties",]
        if "items" in node.schema and "prefixItems" not in node.schema:
            out["items"] = parts["items",]
        groups = [part for names, part in parts.items() if names[0] == "allOf"]
        groups += [
            {"anyOf": [part for names, part in parts.items() if names[0] == keyword]}
            for keyword in _CHOICES
            if keyword in node.schema
        ]
        target = self.within._target(place)
        groups += [self.schema(target, path)] if target is not None else []
        return {**out, "allOf": groups} if groups else out


def _patterns(node: Node) -> Iterator[str]:
    if isinstance(node.schema, dict):
        pattern = node.schema.get("pattern")
        if isinstance(pattern, str):
            yield pattern
        yield from node.schema.get("patternProperties", ())


def _widened(node: Node) -> Iterator[tuple[tuple, int]]:
    """Yield the children that a wider schema includes. Other keywords, such as `not`, are left out."""
    for names, child in node.children.items():
        if names[0] in ("properties", "additionalProperties", "items", "allOf", *_CHOICES):
            yield names, child
