"""A schema read into a document: each subschema once, in draft 2020-12, with whole URIs as references.

A `$ref` may lead under a keyword that nobody knows, and into the documents of a store: what it leads to is
read then. A fault in what only references lead to ($defs) counts when one does.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn
from urllib.parse import urljoin

from mmengine.structured_output.json_schema.reading.document import Document, Node, names_of, split_uri
from mmengine.structured_output.json_schema.reading.loading import MAX_BYTES, dumps, loads, parsed
from mmengine.structured_output.json_schema.reading.translation import (
    Translated,
    says_a_type_alone,
    subschemas,
    translate,
)
from mmengine.structured_output.json_schema.reading.unknown_keywords import add_notes, refuse_unknown
from mmengine.structured_output.json_schema.vocabulary.dialects import SIBLINGS_IGNORED, UNSAID, draft_of
from mmengine.structured_output.json_schema.vocabulary.keywords import (
    SUBSCHEMA_LIST,
    SUBSCHEMA_MAP,
    check_values,
    shown,
)
from mmengine.structured_output.json_schema.vocabulary.refusal import (
    SchemaRefused,
    refuse,
    shown_pointer,
    step,
)

MAX_DEPTH = 64  # of subschemas inside one another
MAX_SUBSCHEMAS = 20_000

_HOLDING = SUBSCHEMA_LIST | SUBSCHEMA_MAP  # whose values are changed where they hold schemas
_SCOPING = frozenset(("$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor"))
Given = dict | bool | str | bytes


class Scope(NamedTuple):
    """What a schema object has from those around it: the URI that its references are relative to, the place
    of its resource, and the draft."""

    base: str
    resource: int
    draft: int


class _Final(SchemaRefused):
    """A refusal of the whole, wherever its reason stands."""


@dataclass(slots=True)
class Reader:
    store: Mapping[str, object]  # by URI
    strict: bool  # whether unknown keywords are refused
    document: Document = field(default_factory=Document)
    given: dict[int, object] = field(default_factory=dict)  # by place: the schema as it was given
    scopes: dict[int, Scope] = field(default_factory=dict)  # by place
    references: list[str] = field(default_factory=list)
    aliases: list[tuple[str, str, int]] = field(default_factory=list)  # URI, fragment, place
    of_2019: dict[str, str] = field(default_factory=dict)  # pointers, by keyword
    walked: int = 0
    known: bool = True  # whether what is walked stands where a keyword says that it is a schema

    def read(self, value: object) -> Document:
        self._walk(value, "", Scope("", 0, UNSAID), 0)
        document = self.document
        document.resources.setdefault("", 0)
        self._add_aliases()
        for reference in self.references:  # which grows
            uri, fragment = split_uri(reference)
            if uri not in document.resources and uri in self.store:
                place = len(document.nodes)
                document.resources[uri] = place
                scope = Scope(uri, place, self.scopes[0].draft)
                self._aside(self.store[uri], f"{uri}#", scope, 0)
                self._add_aliases()
            if fragment.startswith("/") and uri in document.resources:
                self._walk_to(document.resources[uri], names_of(fragment))
        return document

    def _walk(self, given: object, pointer: str, scope: Scope, depth: int) -> int:
        self.walked += 1
        if depth > MAX_DEPTH:
            _refuse_all(pointer, f"subschemas are nested more than {MAX_DEPTH} deep")
        if self.walked > MAX_SUBSCHEMAS:
            _refuse_all(pointer, f"it has more than {MAX_SUBSCHEMAS:,} subschemas")
        if not isinstance(given, dict | bool):
            refuse("", pointer, f"a schema must be an object, true or false, not {shown(given)}")
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
        if says_a_type_alone(given, self.scopes[place].draft):  # as most do: the same, faster
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
                whole = joined(scope.base, node.schema[keyword], keyword, node.pointer)
                node.schema[keyword] = whole
                self.references.append(whole)
        for names, child in subschemas(made.schema):
            stands = step(node.pointer, *made.origins.get(names, names))
            at = node.children[names] = self._walk(child, stands, scope, depth + 1)
            inside = node.schema if len(names) == 1 else node.schema[names[0]]
            inside[names[-1]] = self.document.nodes[at].schema
        for names, child in made.aside:
            self._aside(child, step(node.pointer, *names), scope, depth + 1)

    def _check_2019(self, schema: dict[str, object], pointer: str) -> None:
        """What contains has found is evaluated since 2020-12, which unevaluatedItems sees; not so before."""
        for keyword in ("contains", "unevaluatedItems"):
            if keyword in schema:
                self.of_2019.setdefault(keyword, step(pointer, keyword))
        if len(self.of_2019) == 2:
            why = "with contains in one schema of draft 2019-09 it cannot be enforced"
            raise _Final("unevaluatedItems", shown_pointer(self.of_2019["unevaluatedItems"]), why)

    def _aside(self, given: object, pointer: str, scope: Scope, depth: int) -> None:
        """Walks what restricts nothing unless a reference leads there; only then is a fault in it one."""
        try:
            self._walk(given, pointer, scope, depth)
        except _Final:
            raise
        except SchemaRefused:
            pass

    def _enter(self, given: dict, pointer: str, place: int) -> Scope:
        """The scope inside a schema object, whose names are kept."""
        scope = self.scopes[place]
        if _SCOPING.isdisjoint(given):
            return scope
        base, resource, draft = scope
        draft = draft_of(given.get("$schema")) or draft
        keyword = "id" if draft in (3, 4) else "$id"
        name = given.get(keyword)
        if name is not None and not (draft in SIBLINGS_IGNORED and "$ref" in given):
            if not isinstance(name, str):
                refuse(keyword, step(pointer, keyword), f"it must be a string, not {shown(name)}")
            if draft in SIBLINGS_IGNORED and name.startswith("#"):
                self._call(place, base, name[1:])
            else:
                base = split_uri(joined(base, name, keyword, pointer))[0]
                self._call(place, base)
                resource = place
        elif isinstance(given.get("id"), str) and draft == UNSAID:
            self.aliases.append((*split_uri(joined(base, given["id"], "id", pointer)), place))
        elif isinstance(name, str):
            self.aliases.append((*split_uri(joined(base, name, keyword, pointer)), place))
        if draft in (UNSAID, 2019, 2020):
            self._anchor(given, pointer, place, Scope(base, resource, draft))
        return Scope(base, resource, draft)

    def _anchor(self, given: dict, pointer: str, place: int, scope: Scope) -> None:
        dynamic = self.document.dynamic
        for keyword in ("$anchor", "$dynamicAnchor"):
            if keyword not in given or keyword == "$dynamicAnchor" and scope.draft == 2019:
                continue
            name = given[keyword]
            if not isinstance(name, str):
                refuse(keyword, step(pointer, keyword), f"it must be a string, not {shown(name)}")
            self._call(place, scope.base, name)
            if keyword == "$dynamicAnchor":
                dynamic.setdefault(name, {}).setdefault(scope.resource, place)
        if scope.draft == 2019 and given.get("$recursiveAnchor") is True and place == scope.resource:
            dynamic.setdefault("", {})[place] = place

    def _call(self, place: int, uri: str, anchor: str = "") -> None:
        """Gives a place a name. Two schemas that differ must not have one."""
        document = self.document
        if anchor:
            first = document.anchors.setdefault((uri, anchor), place)
        else:
            first = document.resources.setdefault(uri, place)
        if first != place and self.known and self.given[first] != self.given[place]:
            document.twice.add((uri, anchor))

    def _add_aliases(self) -> None:
        """Names that count where no others do: an `id` whose draft is not said, or one beside a $ref."""
        for uri, fragment, place in self.aliases:
            if fragment:
                self.document.anchors.setdefault((uri, fragment), place)
            else:
                self.document.resources.setdefault(uri, place)
        self.aliases.clear()

    def _walk_to(self, resource: int, names: list[str]) -> None:
        """Reads what a pointer leads to if it stands where no keyword says that it is a schema."""
        pointer = self.document.nodes[resource].pointer
        if step(pointer, *names) in self.document.places:
            return
        given, scope = self.given[resource], self.scopes[resource]
        for name in names:
            if isinstance(given, dict) and name in given:
                given = given[name]
            elif isinstance(given, list) and name.isdecimal() and int(name) < len(given):
                given = given[int(name)]
            else:
                return
            pointer = step(pointer, name)
            scope = self.scopes.get(self.document.places.get(pointer, -1), scope)
        self.known = False
        self._aside(given, pointer, scope, 0)
        self.known = True

    def _note(self, made: Translated, pointer: str, draft: int) -> None:
        if made.unknown and self.strict:
            try:
                refuse_unknown(made.unknown[0], draft, pointer)
            except SchemaRefused as error:
                raise _Final(error.keyword, error.pointer, error.why) from None
        add_notes(self.document.notes, made, pointer, draft)


def joined(base: str, reference: object, keyword: str, pointer: str) -> str:
    """A reference as a whole URI."""
    assert isinstance(reference, str)  # check_values saw to it
    if reference.startswith("#"):
        return base + reference
    try:
        return urljoin(base, reference)
    except ValueError:
        refuse(keyword, step(pointer, keyword), f"{shown(reference)} is no URI reference")


def _refuse_all(pointer: str, why: str) -> NoReturn:
    raise _Final("", f"#{pointer}", why)


def read(schema: Given, schemas: Mapping[str, object] | None = None, strict: bool = False) -> Document:
    """The document of a schema, given as JSON text or as what JSON text decodes to.

    `schemas`: what its references may lead to outside of it, by URI. `strict`: unknown keywords are refused.
    """
    size = 0
    store: dict[str, object] = {}
    for uri, given in (schemas or {}).items():
        text = given if isinstance(given, str | bytes) else dumps(given)
        size += len(text)
        if size > MAX_BYTES:
            refuse("", "", f"the documents in schemas have more than {MAX_BYTES:,} bytes")
        store[split_uri(uri)[0]] = loads(text)
    return Reader(store, strict).read(parsed(schema))
