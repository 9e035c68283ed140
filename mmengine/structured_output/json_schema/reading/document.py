"""A schema as a list of subschemas, and its references' targets. A place is an index into the list."""

from dataclasses import dataclass, field
from urllib.parse import unquote

import msgspec

from mmengine.structured_output.json_schema.patterns.matching import MatchBudget
from mmengine.structured_output.json_schema.reading.translation import Names
from mmengine.structured_output.json_schema.vocabulary.keywords import ANNOTATIONS, ASSERTIONS, show_value
from mmengine.structured_output.json_schema.vocabulary.notes import Notes
from mmengine.structured_output.json_schema.vocabulary.refusal import SchemaRefused, join_pointer, refuse

# Subschemas of arrays and objects are resolved to the target of their $ref. A subschema that applies to the
# same value as its parent (as in allOf) is not: two such places could become identical.
_PARTS = frozenset(("properties", "patternProperties", "additionalProperties", "items", "prefixItems"))
_SCALARS = frozenset(("null", "boolean", "integer", "number", "string"))
_SAYS = ASSERTIONS - ANNOTATIONS - {"$ref"}


class Node(msgspec.Struct):
    """A subschema.

    `schema` holds the keywords that restrict values, in draft 2020-12 and with absolute URIs as references.
    `pointer` is the JSON pointer into the input. `children` maps the names that lead to a subschema to its
    place.
    """

    schema: dict | bool
    pointer: str
    children: dict[Names, int] = {}


@dataclass(slots=True)
class Document:
    """A schema's subschemas with their identifiers and anchors.

    `dynamic` maps a $dynamicAnchor's name to {resource's place: place that defines the anchor}. The name ""
    stands for draft 2019-09's $recursiveAnchor. `faults` maps a place that no schema may refer to, because it
    is invalid, to its refusal.
    """

    nodes: list[Node] = field(default_factory=list)  # A place is an index into this list; 0 is the root.
    places: dict[str, int] = field(default_factory=dict)  # Places, keyed by pointer.
    resources: dict[str, int] = field(default_factory=dict)  # Places, keyed by URI without a fragment.
    anchors: dict[tuple[str, str], int] = field(default_factory=dict)  # Places, keyed by URI and anchor.
    # URIs and anchors that two different schemas define.
    ambiguous: set[tuple[str, str]] = field(default_factory=set)
    dynamic: dict[str, dict[int, int]] = field(default_factory=dict)
    # Maps a place to the place of its resource.
    resource_of: dict[int, int] = field(default_factory=dict)
    faults: dict[int, SchemaRefused] = field(default_factory=dict)
    parts: dict[int, int] = field(default_factory=dict)  # Places, keyed by id() of the schema object.
    # Places of schemas that are not part of the input, keyed by the caller's `key`.
    synthetic: dict[object, int] = field(default_factory=dict)
    budget: MatchBudget = field(default_factory=MatchBudget)  # Limits the matching of names against patterns.
    # For each scalar type, the place of the first subschema that consists of this type alone.
    scalar_parts: dict[str, int] = field(default_factory=dict)
    # Results of `outermost_resources` (dynamic_references.py), keyed by $dynamicAnchor.
    ways: dict[str, dict[int, set[int | None]]] = field(default_factory=dict)
    notes: Notes = field(default_factory=Notes)
    # Parts that are enforced more narrowly than the schema says.
    narrowings: Notes = field(default_factory=Notes)

    def make(self, schema: dict | bool, pointer: str, key: object) -> int:
        """Return the place for a schema outside the input; each `key` has its own place."""
        if key not in self.synthetic:
            self.synthetic[key] = len(self.nodes)
            self.nodes.append(Node(schema, pointer))
        return self.synthetic[key]

    def subschema(self, place: int, *names: str | int) -> int:
        """Return a subschema's place; `names` is the path within the node's schema. Missing subschemas in a
        synthetic schema are added to the document.
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
        """Return an item's or a property's subschema as a conjunction: (place,), or () if the subschema
        allows everything.
        """
        found = self.subschema(place, *names)
        return () if self.nodes[found].schema in (True, {}) else (found,)

    def _resolve_alias(self, place: int) -> int:
        """Follow a subschema that is only a $ref to its target, so that many references share one part. All
        subschemas that are only the same scalar type share the first such place, because they are never
        refused and need no pointer.
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
                break  # The refusal is reported where the place is used, if at all.
        return place

    def target(self, place: int) -> int:
        """Return the place that a place's $ref leads to."""
        node = self.nodes[place]
        assert isinstance(node.schema, dict)
        return self.lookup(node.schema["$ref"], "$ref", node.pointer)

    def lookup(self, reference: str, keyword: str, pointer: str) -> int:
        """Return the place that an absolute reference leads to; `keyword` and `pointer` say which keyword
        holds the reference.
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
    """Return a schema's type if that is a scalar type and the only keyword, else None."""
    if isinstance(schema, bool) or len(schema) != 1:
        return None
    kind = schema.get("type")
    return kind if isinstance(kind, str) and kind in _SCALARS else None


def split_uri(uri: str) -> tuple[str, str]:
    """Split a URI into the part before its fragment, and the fragment."""
    uri, _, fragment = uri.partition("#")
    return uri, fragment


def pointer_names(fragment: str) -> list[str]:
    """Return the names in a JSON pointer from a URI's fragment."""
    return [unquote(name).replace("~1", "/").replace("~0", "~") for name in fragment[1:].split("/")]
