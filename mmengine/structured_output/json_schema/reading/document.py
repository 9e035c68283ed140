"""A schema as a tree of numbered places, and where its references lead."""

from dataclasses import dataclass, field
from urllib.parse import unquote

import msgspec

from mmengine.structured_output.json_schema.patterns.matching import Budget
from mmengine.structured_output.json_schema.reading.translation import Names
from mmengine.structured_output.json_schema.vocabulary.keywords import ANNOTATIONS, ASSERTIONS, shown
from mmengine.structured_output.json_schema.vocabulary.notes import Notes
from mmengine.structured_output.json_schema.vocabulary.refusal import SchemaRefused, refuse, step

# Of arrays and objects; what stands in one place with its schema is not moved, or it could seem to be that.
_PARTS = frozenset(("properties", "patternProperties", "additionalProperties", "items", "prefixItems"))
_SCALARS = frozenset(("null", "boolean", "integer", "number", "string"))
_SAYS = ASSERTIONS - ANNOTATIONS - {"$ref"}


class Node(msgspec.Struct):
    """One subschema: what it restricts, in the words of draft 2020-12 and with whole URIs as references; the
    pointer to where it stands in what was given; the places of its subschemas."""

    schema: dict | bool
    pointer: str
    children: dict[Names, int] = {}


@dataclass(slots=True)
class Document:
    """`dynamic`: by name, the places of that $dynamicAnchor by the place of the resource it stands in; the
    name "" is the $recursiveAnchor of draft 2019-09. `faults`: of places that no schema may lead to."""

    nodes: list[Node] = field(default_factory=list)  # a place is an index into it; 0 is the root
    places: dict[str, int] = field(default_factory=dict)  # by pointer
    resources: dict[str, int] = field(default_factory=dict)  # by URI, without a fragment
    anchors: dict[tuple[str, str], int] = field(default_factory=dict)  # by URI and name
    twice: set[tuple[str, str]] = field(default_factory=set)  # URIs, and anchors of them, of two schemas
    dynamic: dict[str, dict[int, int]] = field(default_factory=dict)
    resource_of: dict[int, int] = field(default_factory=dict)  # the place of the resource of a place
    faults: dict[int, SchemaRefused] = field(default_factory=dict)
    parts: dict[int, int] = field(default_factory=dict)  # places by the identity of their schema objects
    made: dict[object, int] = field(default_factory=dict)  # places of schemas that stand nowhere
    budget: Budget = field(default_factory=Budget)  # for comparing names with patterns
    of_type: dict[str, int] = field(default_factory=dict)  # places of parts that say no more than a type
    ways: dict[str, dict[int, set[int | None]]] = field(default_factory=dict)  # by $dynamicAnchor: dynamic.py
    notes: Notes = field(default_factory=Notes)
    narrower: Notes = field(default_factory=Notes)  # what is enforced more narrowly than it is said

    def make(self, schema: dict | bool, pointer: str, key: object) -> int:
        """The place of a schema that stands nowhere in the document, one for each `key`."""
        if key not in self.made:
            self.made[key] = len(self.nodes)
            self.nodes.append(Node(schema, pointer))
        return self.made[key]

    def at(self, place: int, *names: str | int) -> int:
        """The place of a subschema of a place, by where it stands in the node's schema. What is not in the
        document in a made schema is made too."""
        node = self.nodes[place]
        if names in node.children:
            found: int | None = node.children[names]
        else:
            schema = node.schema
            for name in names:
                schema = schema[name]  # type: ignore[index]
            found = self.parts.get(id(schema))
        if found is None:
            return self.make(schema, step(node.pointer, *names), (place, names))
        return self._meant(found) if names[0] in _PARTS else found

    def part(self, place: int, *names: str | int) -> tuple[int, ...]:
        """The same for an item or a property, as a conjunction: of nothing where anything is allowed."""
        found = self.at(place, *names)
        return () if self.nodes[found].schema in (True, {}) else (found,)

    def _meant(self, place: int) -> int:
        """Where a place leads that says nothing but $ref, so that what many places refer to is one part. Of
        those that say nothing but one of these types, which is never refused and so needs no pointer, the
        first."""
        seen = set()
        while place not in seen:
            seen.add(place)
            schema = self.nodes[place].schema
            if not isinstance(schema, dict):
                break
            if kind := scalar_type(schema):
                return self.of_type.setdefault(kind, place)
            if "$ref" not in schema or set(schema) & _SAYS:
                break
            try:
                place = self.target(place)
            except SchemaRefused:
                break  # said where the place is used, if it is
        return place

    def target(self, place: int) -> int:
        """Where the $ref of a place leads."""
        node = self.nodes[place]
        assert isinstance(node.schema, dict)
        return self.lookup(node.schema["$ref"], "$ref", node.pointer)

    def lookup(self, reference: str, keyword: str, pointer: str) -> int:
        """Where a whole reference leads; `keyword` and `pointer` say whose it is."""
        uri, fragment = split_uri(reference)
        found = self.resources.get(uri)
        if found is None:
            why = f"{shown(reference)} is outside this schema; put it under $defs, or give it in schemas"
            refuse(keyword, step(pointer, keyword), why)
        if (uri, "") in self.twice or (uri, fragment) in self.twice:
            refuse(keyword, step(pointer, keyword), f"{shown(reference)} is the name of two schemas")
        if fragment.startswith("/"):
            found = self.places.get(step(self.nodes[found].pointer, *names_of(fragment)))
        elif fragment:
            found = self.anchors.get((uri, fragment))
        if found is None:
            refuse(keyword, step(pointer, keyword), f"{shown(reference)} leads to no schema")
        if found in self.faults:
            raise self.faults[found]
        return found


def scalar_type(schema: dict | bool) -> str | None:
    """The type, if it is all that a schema says, and not one of those that hold others."""
    if isinstance(schema, bool) or len(schema) != 1:
        return None
    kind = schema.get("type")
    return kind if isinstance(kind, str) and kind in _SCALARS else None


def split_uri(uri: str) -> tuple[str, str]:
    """A URI without its fragment, and the fragment."""
    uri, _, fragment = uri.partition("#")
    return uri, fragment


def names_of(fragment: str) -> list[str]:
    """The names of a JSON pointer in the fragment of a URI."""
    return [unquote(name).replace("~1", "/").replace("~0", "~") for name in fragment[1:].split("/")]
