"""Defines the parsed form of a schema: a list of subschemas, and the targets of references.

A place is an index into the list.
"""

from dataclasses import dataclass, field

import msgspec

from mmengine.structured_output.json_pointer import join_pointer, pointer_names
from mmengine.structured_output.json_schema.patterns.matching import MatchBudget
from mmengine.structured_output.json_schema.reading.translation import Names
from mmengine.structured_output.json_schema.vocabulary.keywords import ANNOTATIONS, ASSERTIONS, show_value
from mmengine.structured_output.json_schema.vocabulary.notes import Notes
from mmengine.structured_output.json_schema.vocabulary.refusal import SchemaRefused, refuse

# If a subschema below these keywords is only a $ref, its target replaces it. Subschemas in allOf and similar
# keywords are never replaced, because two $refs to the same target would then share a place.
_PARTS = frozenset(("properties", "patternProperties", "additionalProperties", "items", "prefixItems"))
_SCALARS = frozenset(("null", "boolean", "integer", "number", "string"))
_SAYS = ASSERTIONS - ANNOTATIONS - {"$ref"}


class Node(msgspec.Struct):
    """A subschema.

    `schema`: the keywords that restrict values, in draft 2020-12, with absolute URIs as references.
    `pointer`: the subschema's JSON pointer in the input. `children`: maps a direct subschema's path, such as
    ("properties", "a"), to its place.
    """

    schema: dict | bool
    pointer: str
    children: dict[Names, int] = {}


@dataclass(slots=True)
class Document:
    """A parsed schema: its subschemas, with their identifiers and anchors.

    A resource is a schema with its own URI. `dynamic` maps a $dynamicAnchor's name to {resource's place:
    anchor's place}. The name "" stands for $recursiveAnchor in draft 2019-09. `faults` maps an invalid
    subschema's place to the error for references to the subschema.
    """

    nodes: list[Node] = field(default_factory=list)  # The subschemas by place; 0 is the root.
    places: dict[str, int] = field(default_factory=dict)  # Pointer -> place.
    resources: dict[str, int] = field(default_factory=dict)  # URI without a fragment -> place.
    anchors: dict[tuple[str, str], int] = field(default_factory=dict)  # (URI, anchor) -> place.
    # (URI, anchor) pairs that two different schemas define.
    ambiguous: set[tuple[str, str]] = field(default_factory=set)
    dynamic: dict[str, dict[int, int]] = field(default_factory=dict)
    # Place -> place of its resource.
    resource_of: dict[int, int] = field(default_factory=dict)
    faults: dict[int, SchemaRefused] = field(default_factory=dict)
    parts: dict[int, int] = field(default_factory=dict)  # id() of a schema object -> place.
    # The argument `key` in a call to `make` -> place.
    synthetic: dict[object, int] = field(default_factory=dict)
    # Limits the work on matching names against patterns.
    budget: MatchBudget = field(default_factory=MatchBudget)
    # Scalar type -> place of the first subschema that consists of this type alone.
    scalar_parts: dict[str, int] = field(default_factory=dict)
    # $dynamicAnchor -> result of `outermost_resources` (dynamic_references.py).
    ways: dict[str, dict[int, set[int | None]]] = field(default_factory=dict)
    notes: Notes = field(default_factory=Notes)
    # Notes on subschemas whose grammar excludes some allowed values.
    narrowings: Notes = field(default_factory=Notes)

    def make(self, schema: dict | bool, pointer: str, key: object) -> int:
        """Add a schema that is not part of the input, and return its place.

        Calls with the same `key` share a place.
        """
        if key not in self.synthetic:
            self.synthetic[key] = len(self.nodes)
            self.nodes.append(Node(schema, pointer))
        return self.synthetic[key]

    def subschema(self, place: int, *names: str | int) -> int:
        """Return a subschema's place. `names` is the path within the node's schema.

        If the node comes from `make`, its subschemas are added to the document at their first use.
        """
        node = self.nodes[place]
        if names in node.children:
            found: int | None = node.children[names]
        else:
            schema = node.schema
            for name in names:
                schema = schema[name]  # type: ignore[index]
            found = self.parts.get(id(schema))
        if found is None:
            return self.make(schema, join_pointer(node.pointer, *names), (place, names))
        return self._resolve_alias(found) if names[0] in _PARTS else found

    def part(self, place: int, *names: str | int) -> tuple[int, ...]:
        """Return an item's or a property's subschema as (place,), or () if it allows everything."""
        found = self.subschema(place, *names)
        return () if self.nodes[found].schema in (True, {}) else (found,)

    def _resolve_alias(self, place: int) -> int:
        """Return an equivalent place, so that equal subschemas are expanded only once.

        If the schema is only a $ref, return the target's place. If the schema is only a scalar type, return
        the first place with this type.
        """
        seen = set()
        while place not in seen:
            seen.add(place)
            schema = self.nodes[place].schema
            if not isinstance(schema, dict):
                break
            if kind := scalar_type(schema):
                return self.scalar_parts.setdefault(kind, place)
            if "$ref" not in schema or set(schema) & _SAYS:
                break
            try:
                place = self.target(place)
            except SchemaRefused:
                break  # The error is reported if the place is used.
        return place

    def target(self, place: int) -> int:
        """Return the place to which the $ref of `place` leads."""
        node = self.nodes[place]
        assert isinstance(node.schema, dict)
        return self.lookup(node.schema["$ref"], "$ref", node.pointer)

    def lookup(self, reference: str, keyword: str, pointer: str) -> int:
        """Return the place to which an absolute reference leads.

        `keyword` and `pointer`: the reference's keyword and position, for errors.
        """
        uri, fragment = split_uri(reference)
        found = self.resources.get(uri)
        if found is None:
            advice = "put the target under $defs, or pass it in schemas"
            why = f"{show_value(reference)} is outside this schema; {advice}"
            refuse(keyword, join_pointer(pointer, keyword), why)
        if (uri, "") in self.ambiguous or (uri, fragment) in self.ambiguous:
            refuse(
                keyword,
                join_pointer(pointer, keyword),
                f"{show_value(reference)} identifies two different schemas",
            )
        if fragment.startswith("/"):
            found = self.places.get(join_pointer(self.nodes[found].pointer, *pointer_names(fragment)))
        elif fragment:
            found = self.anchors.get((uri, fragment))
        if found is None:
            refuse(keyword, join_pointer(pointer, keyword), f"{show_value(reference)} leads to no schema")
        if found in self.faults:
            raise self.faults[found]
        return found


def scalar_type(schema: dict | bool) -> str | None:
    """Return a schema's type if it is a scalar type and the schema's only keyword, else None."""
    if isinstance(schema, bool) or len(schema) != 1:
        return None
    kind = schema.get("type")
    return kind if isinstance(kind, str) and kind in _SCALARS else None


def split_uri(uri: str) -> tuple[str, str]:
    """Split a URI into (URI without the fragment, fragment)."""
    uri, _, fragment = uri.partition("#")
    return uri, fragment
