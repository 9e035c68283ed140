"""Reads a schema into a Document. Each subschema is read once, and is translated to draft 2020-12 with
absolute URIs as references.

A target below an unknown keyword or in another document is read when a `$ref` leads to it. A fault under
$defs is an error only if a reference leads to the faulty schema.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn
from urllib.parse import urljoin

from mmengine.structured_output.json_pointer import child_of, join_pointer, pointer_names
from mmengine.structured_output.json_schema.reading.document import Document, Node, split_uri
from mmengine.structured_output.json_schema.reading.loading import MAX_BYTES, dumps, loads, parse_schema
from mmengine.structured_output.json_schema.reading.translation import (
    TranslatedSchema,
    has_only_type,
    subschemas,
    translate,
)
from mmengine.structured_output.json_schema.reading.unknown_keywords import add_notes, refuse_unknown
from mmengine.structured_output.json_schema.vocabulary.dialects import SIBLINGS_IGNORED, UNSPECIFIED, draft_of
from mmengine.structured_output.json_schema.vocabulary.keywords import (
    SUBSCHEMA_LIST,
    SUBSCHEMA_MAP,
    check_values,
    show_value,
)
from mmengine.structured_output.json_schema.vocabulary.refusal import SchemaRefused, format_pointer, refuse

MAX_DEPTH = 64  # Maximum nesting depth of subschemas.
MAX_SUBSCHEMAS = 20_000

# Keywords with values that contain subschemas. The reader copies these values before it changes them.
_HOLDING = SUBSCHEMA_LIST | SUBSCHEMA_MAP
_SCOPING = frozenset(("$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor"))
SchemaInput = dict | bool | str | bytes


class Scope(NamedTuple):
    """A schema object's context: the base URI for references, the resource's place, and the draft. A place is
    an index in `Document.nodes`.
    """

    base: str
    resource: int
    draft: int


class _FinalRefusal(SchemaRefused):
    """Refuses the whole schema, even if the faulty part is never used."""


@dataclass(slots=True)
class Reader:
    store: Mapping[str, object]  # URI -> supplied document.
    strict: bool  # Whether unknown keywords are refused.
    document: Document = field(default_factory=Document)
    given: dict[int, object] = field(default_factory=dict)  # Place -> schema as it was supplied.
    scopes: dict[int, Scope] = field(default_factory=dict)  # Place -> scope.
    references: list[str] = field(default_factory=list)
    # Identifiers that the draft ignores, as (URI, fragment, place). References may use them too.
    aliases: list[tuple[str, str, int]] = field(default_factory=list)
    # For `_check_2019`: keyword -> JSON pointer to the keyword's first use.
    of_2019: dict[str, str] = field(default_factory=dict)
    walked: int = 0
    # Whether a known keyword makes the current value a schema.
    at_schema_position: bool = True

    def read(self, value: object) -> Document:
        self._walk(value, "", Scope("", 0, UNSPECIFIED), 0)
        document = self.document
        document.resources.setdefault("", 0)
        self._add_aliases()
        for reference in self.references:  # The list grows during the loop.
            uri, fragment = split_uri(reference)
            if uri not in document.resources and uri in self.store:
                place = len(document.nodes)
                document.resources[uri] = place
                scope = Scope(uri, place, self.scopes[0].draft)
                self._walk_unused(self.store[uri], f"{uri}#", scope, 0)
                self._add_aliases()
            if fragment.startswith("/") and uri in document.resources:
                self._walk_to(document.resources[uri], pointer_names(fragment))
        return document

    def _walk(self, given: object, pointer: str, scope: Scope, depth: int) -> int:
        self.walked += 1
        if depth > MAX_DEPTH:
            _refuse_all(pointer, f"subschemas are nested more than {MAX_DEPTH} levels deep")
        if self.walked > MAX_SUBSCHEMAS:
            _refuse_all(pointer, f"the schema has more than {MAX_SUBSCHEMAS:,} subschemas")
        if not isinstance(given, dict | bool):
            refuse("", pointer, f"a schema must be an object, true or false, not {show_value(given)}")
        place = len(self.document.nodes)
        node = Node({} if isinstance(given, dict) else given, pointer)
        self.document.nodes.append(node)
        self.document.places[pointer] = place
        self.given[place] = given
        self.scopes[place] = scope
        self.document.resource_of[place] = scope.resource
        if isinstance(given, dict):
            try:
                self._fill(node, given, place, depth)
            except SchemaRefused as error:
                self.document.faults[place] = error
                raise
        return place

    def _fill(self, node: Node, given: dict, place: int, depth: int) -> None:
        # A fast path for the most common schemas, with the same result as below.
        if has_only_type(given, self.scopes[place].draft):
            node.schema = {"type": given["type"]}
            self.document.parts[id(node.schema)] = place
            return
        scope = self.scopes[place] = self._enter(given, node.pointer, place)
        self.document.resource_of[place] = scope.resource
        made = translate(given, scope.draft, node.pointer)
        if made.unknown or made.remarks:
            self._note(made, node.pointer, scope.draft)
        if scope.draft == 2019:
            self._check_2019(made.schema, node.pointer)
        check_values(made.schema, node.pointer)
        assert isinstance(node.schema, dict)
        node.schema.update(made.schema)
        for keyword in _HOLDING.intersection(node.schema):
            value = node.schema[keyword]
            node.schema[keyword] = value.copy() if isinstance(value, list | dict) else value
        self.document.parts[id(node.schema)] = place
        for keyword in ("$ref", "$dynamicRef"):
            if keyword in node.schema:
                whole = resolve_uri(scope.base, node.schema[keyword], keyword, node.pointer)
                node.schema[keyword] = whole
                self.references.append(whole)
        for names, child in subschemas(made.schema):
            stands = join_pointer(node.pointer, *made.origins.get(names, names))
            at = node.children[names] = self._walk(child, stands, scope, depth + 1)
            inside = node.schema if len(names) == 1 else node.schema[names[0]]
            inside[names[-1]] = self.document.nodes[at].schema
        for names, child in made.unused:
            self._walk_unused(child, join_pointer(node.pointer, *names), scope, depth + 1)

    def _check_2019(self, schema: dict[str, object], pointer: str) -> None:
        """Refuse `contains` together with `unevaluatedItems` in draft 2019-09.

        Items that match `contains` count as evaluated in draft 2020-12, but not in draft 2019-09.
        """
        for keyword in ("contains", "unevaluatedItems"):
            if keyword in schema:
                self.of_2019.setdefault(keyword, join_pointer(pointer, keyword))
        if len(self.of_2019) == 2:
            why = "cannot be enforced together with contains in draft 2019-09"
            raise _FinalRefusal("unevaluatedItems", format_pointer(self.of_2019["unevaluatedItems"]), why)

    def _walk_unused(self, given: object, pointer: str, scope: Scope, depth: int) -> None:
        """Read a subschema under $defs. Its faults are errors only if a reference leads to the subschema."""
        try:
            self._walk(given, pointer, scope, depth)
        except _FinalRefusal:
            raise
        except SchemaRefused:
            pass

    def _enter(self, given: dict, pointer: str, place: int) -> Scope:
        """Register a schema object's identifiers, and return the scope inside the object."""
        scope = self.scopes[place]
        if _SCOPING.isdisjoint(given):
            return scope
        base, resource, draft = scope
        draft = draft_of(given.get("$schema")) or draft
        keyword = "id" if draft in (3, 4) else "$id"
        name = given.get(keyword)
        if name is not None and not (draft in SIBLINGS_IGNORED and "$ref" in given):
            if not isinstance(name, str):
                refuse(keyword, join_pointer(pointer, keyword), f"must be a string, not {show_value(name)}")
            if draft in SIBLINGS_IGNORED and name.startswith("#"):
                self._register(place, base, name[1:])
            else:
                base = split_uri(resolve_uri(base, name, keyword, pointer))[0]
                self._register(place, base)
                resource = place
        elif isinstance(given.get("id"), str) and draft == UNSPECIFIED:
            self.aliases.append((*split_uri(resolve_uri(base, given["id"], "id", pointer)), place))
        elif isinstance(name, str):
            self.aliases.append((*split_uri(resolve_uri(base, name, keyword, pointer)), place))
        if draft in (UNSPECIFIED, 2019, 2020):
            self._anchor(given, pointer, place, Scope(base, resource, draft))
        return Scope(base, resource, draft)

    def _anchor(self, given: dict, pointer: str, place: int, scope: Scope) -> None:
        dynamic = self.document.dynamic
        for keyword in ("$anchor", "$dynamicAnchor"):
            if keyword not in given or keyword == "$dynamicAnchor" and scope.draft == 2019:
                continue
            name = given[keyword]
            if not isinstance(name, str):
                refuse(keyword, join_pointer(pointer, keyword), f"must be a string, not {show_value(name)}")
            self._register(place, scope.base, name)
            if keyword == "$dynamicAnchor":
                dynamic.setdefault(name, {}).setdefault(scope.resource, place)
        if scope.draft == 2019 and given.get("$recursiveAnchor") is True and place == scope.resource:
            dynamic.setdefault("", {})[place] = place

    def _register(self, place: int, uri: str, anchor: str = "") -> None:
        """Register an identifier or anchor for a place.

        If two different schemas share a name, the name becomes ambiguous.
        """
        document = self.document
        if anchor:
            first = document.anchors.setdefault((uri, anchor), place)
        else:
            first = document.resources.setdefault(uri, place)
        if first != place and self.at_schema_position and self.given[first] != self.given[place]:
            document.ambiguous.add((uri, anchor))

    def _add_aliases(self) -> None:
        """Register the names in `aliases`, unless other schemas have registered them."""
        for uri, fragment, place in self.aliases:
            if fragment:
                self.document.anchors.setdefault((uri, fragment), place)
            else:
                self.document.resources.setdefault(uri, place)
        self.aliases.clear()

    def _walk_to(self, resource: int, names: list[str]) -> None:
        """Read a pointer's target below an unknown keyword."""
        pointer = self.document.nodes[resource].pointer
        if join_pointer(pointer, *names) in self.document.places:
            return
        given, scope = self.given[resource], self.scopes[resource]
        for name in names:
            if (given := child_of(given, name)) is None:
                return
            pointer = join_pointer(pointer, name)
            scope = self.scopes.get(self.document.places.get(pointer, -1), scope)
        self.at_schema_position = False
        self._walk_unused(given, pointer, scope, 0)
        self.at_schema_position = True

    def _note(self, made: TranslatedSchema, pointer: str, draft: int) -> None:
        if made.unknown and self.strict:
            try:
                refuse_unknown(made.unknown[0], draft, pointer)
            except SchemaRefused as error:
                raise _FinalRefusal(error.keyword, error.pointer, error.why) from None
        add_notes(self.document.notes, made, pointer, draft)


def resolve_uri(base: str, reference: object, keyword: str, pointer: str) -> str:
    """Return a reference as an absolute URI. Raises SchemaRefused."""
    assert isinstance(reference, str)  # check_values has checked the type.
    if reference.startswith("#"):
        return base + reference
    try:
        return urljoin(base, reference)
    except ValueError:
        refuse(keyword, join_pointer(pointer, keyword), f"{show_value(reference)} is not a URI reference")


def _refuse_all(pointer: str, why: str) -> NoReturn:
    raise _FinalRefusal("", f"#{pointer}", why)


def read_schema(
    schema: SchemaInput, schemas: Mapping[str, object] | None = None, strict: bool = False
) -> Document:
    """Read a schema from JSON text or from decoded JSON (Python values).

    `schemas` maps URIs to further documents for references. `strict` refuses unknown keywords.
    """
    size = 0
    store: dict[str, object] = {}
    for uri, given in (schemas or {}).items():
        text = given if isinstance(given, str | bytes) else dumps(given)
        size += len(text)
        if size > MAX_BYTES:
            refuse("", "", f"the documents in schemas have more than {MAX_BYTES:,} bytes")
        store[split_uri(uri)[0]] = loads(text)
    return Reader(store, strict).read(parse_schema(schema))
