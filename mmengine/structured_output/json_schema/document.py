"""A schema as a tree of numbered places: read with limits, checked, and its references resolved."""

import json
from dataclasses import dataclass, field
from urllib.parse import unquote, urldefrag, urljoin

from mmengine.structured_output.json_schema.keywords import (
    ANNOTATIONS,
    ASSERTIONS,
    ELDERS,
    KNOWN,
    SUBSCHEMA,
    SUBSCHEMA_LIST,
    SUBSCHEMA_MAP,
    check_values,
    shown,
)
from mmengine.structured_output.json_schema.matching import Budget
from mmengine.structured_output.json_schema.refusal import SchemaRefused, refuse, step

MAX_BYTES = 2 * 2**20  # of the schema as JSON text
MAX_DEPTH = 64  # of subschemas inside one another
MAX_NESTING = 200  # of JSON arrays and objects inside one another, values of enum and const included
MAX_SUBSCHEMAS = 20_000


# Of arrays and objects; what stands in one place with its schema is not moved, or it could seem to be that.
_PARTS = frozenset(("properties", "patternProperties", "additionalProperties", "items", "prefixItems"))
_SAYS = (ASSERTIONS | ELDERS) - ANNOTATIONS - {"$ref"}


@dataclass(slots=True)
class Node:
    """One subschema: its value, the pointer to it, and the URI that its references are relative to."""

    schema: dict | bool
    pointer: str
    base: str


@dataclass(slots=True)
class Document:
    nodes: list[Node] = field(default_factory=list)  # a place is an index into it; 0 is the root
    places: dict[str, int] = field(default_factory=dict)  # by pointer
    resources: dict[str, int] = field(default_factory=dict)  # by URI, without a fragment
    anchors: dict[tuple[str, str], int] = field(default_factory=dict)  # by URI and name
    made: dict[object, int] = field(default_factory=dict)  # places of schemas that stand nowhere
    budget: Budget = field(default_factory=Budget)  # for comparing names with patterns

    def make(self, schema: dict | bool, pointer: str, key: object, base: str = "") -> int:
        """The place of a schema that stands nowhere in the document, one for each `key`."""
        if key not in self.made:
            self.made[key] = len(self.nodes)
            self.nodes.append(Node(schema, pointer, base))
        return self.made[key]

    def at(self, place: int, *names: str | int) -> int:
        """The place of a subschema of a place; a made schema's subschemas are made too."""
        node = self.nodes[place]
        pointer = step(node.pointer, *names)
        found = self.places.get(pointer)
        if found is not None and self.places.get(node.pointer) == place:
            return self._meant(found) if names[0] in _PARTS else found
        schema = node.schema
        for name in names:
            schema = schema[name]  # type: ignore[index]
        return self.make(schema, pointer, (place, names), node.base)

    def _meant(self, place: int) -> int:
        """Where a place leads that says nothing but $ref, so that what many places refer to is one part."""
        seen = set()
        while place not in seen:
            seen.add(place)
            schema = self.nodes[place].schema
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            if set(schema) & _SAYS:
                break
            try:
                place = self.target(place)
            except SchemaRefused:
                break  # said where the place is used, if it is
        return place

    def target(self, place: int) -> int:
        """Where the $ref of a place leads."""
        node = self.nodes[place]
        reference = node.schema["$ref"]  # type: ignore[index]
        pointer = step(node.pointer, "$ref")
        whole = node.base + reference if reference.startswith("#") else urljoin(node.base, reference)
        uri, fragment = urldefrag(whole)
        resource = self.resources.get(uri)
        if resource is None:
            refuse("$ref", pointer, f"{shown(reference)} is outside this schema; put it under $defs")
        if not fragment:
            return resource
        found = self.anchors.get((uri, fragment))
        if fragment.startswith("/"):
            names = (unquote(name).replace("~1", "/").replace("~0", "~") for name in fragment[1:].split("/"))
            found = self.places.get(step(self.nodes[resource].pointer, *names))
        if found is None:
            refuse("$ref", pointer, f"{shown(reference)} leads to no schema")
        return found


def read(schema: dict | bool | str | bytes) -> Document:
    """The document of a schema, given as JSON text or as what JSON text decodes to."""
    value = _loads(schema if isinstance(schema, str | bytes) else _dumps(schema))
    document = Document()
    _walk(document, value, "", "", 0)
    document.resources.setdefault("", 0)
    return document


def _dumps(schema: object) -> str:
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        refuse("", "", "it is nested too deep")
    except (TypeError, ValueError) as error:
        refuse("", "", f"it is not JSON ({error})")


def _loads(text: str | bytes) -> object:
    if len(text) > MAX_BYTES:
        refuse("", "", f"it has more than {MAX_BYTES:,} bytes")
    try:
        if isinstance(text, bytes):
            text = text.decode()
        text.encode()
        value = json.loads(text, object_pairs_hook=_pairs, parse_constant=_constant, parse_float=_float)
        _check_nesting(value)
    except UnicodeEncodeError:
        refuse("", "", "it holds an unpaired surrogate, which is no text")
    except UnicodeDecodeError:
        refuse("", "", "it is not UTF-8")
    except RecursionError:
        refuse("", "", f"it is nested more than {MAX_NESTING} deep")
    except SchemaRefused:
        raise
    except ValueError as error:
        refuse("", "", f"it is not JSON ({error})")
    return value


def _check_nesting(value: object) -> None:
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_NESTING:
            refuse("", "", f"it is nested more than {MAX_NESTING} deep")
        lists = [v.values() if isinstance(v, dict) else v for v in level if isinstance(v, dict | list)]
        level = [item for items in lists for item in items]


def _pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    out = dict(pairs)
    if len(out) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        refuse("", "", f"the key {shown(twice)} is in one object twice")
    return out


def _constant(name: str) -> object:
    refuse("", "", f"{name} is no JSON")


def _float(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        refuse("", "", f"the number {text[:40]} is too large")
    return value


def _walk(document: Document, schema: object, pointer: str, base: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        refuse("", pointer, f"subschemas are nested more than {MAX_DEPTH} deep")
    if len(document.nodes) >= MAX_SUBSCHEMAS:
        refuse("", pointer, f"it has more than {MAX_SUBSCHEMAS:,} subschemas")
    if not isinstance(schema, dict | bool):
        refuse("", pointer, f"a schema must be an object, true or false, not {shown(schema)}")
    place = len(document.nodes)
    if isinstance(schema, dict):
        check_values(schema, pointer)
        if "$id" in schema:
            base = urldefrag(urljoin(base, schema["$id"])).url
            document.resources.setdefault(base, place)
        for keyword in ("$anchor", "$dynamicAnchor"):
            if keyword in schema:
                document.anchors.setdefault((base, schema[keyword]), place)
    document.nodes.append(Node(schema, pointer, base))
    document.places[pointer] = place
    if isinstance(schema, dict):
        for names, child in children(schema):
            _walk(document, child, step(pointer, *names), base, depth + 1)


def children(schema: dict) -> list[tuple[tuple[str | int, ...], object]]:
    """The subschemas of a schema object, by the names that lead to them."""
    out: list[tuple[tuple[str | int, ...], object]] = []
    for keyword, value in schema.items():
        if keyword not in KNOWN:
            continue
        if keyword in SUBSCHEMA:
            out.append(((keyword,), value))
        elif keyword in SUBSCHEMA_LIST:
            out += [((keyword, at), child) for at, child in enumerate(value)]
        elif keyword in SUBSCHEMA_MAP:
            out += [((keyword, name), child) for name, child in value.items()]
    return out
