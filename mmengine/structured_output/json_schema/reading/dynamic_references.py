"""Which schema a $dynamicRef means: that of the outermost resource on the way to it that has the anchor.

Ways begin in the root and follow subschemas and references. Where all of them have the same resource as their
outermost, the reference is as good as a `$ref`.
"""

from mmengine.structured_output.json_schema.reading.document import Document, split_uri
from mmengine.structured_output.json_schema.vocabulary.keywords import shown
from mmengine.structured_output.json_schema.vocabulary.refusal import SchemaRefused, refuse, step

MAX_WAYS = 100_000  # places, each with the outermost resources on ways to it, for one anchor

Way = tuple[int, int | None]  # a place, and the outermost resource with the anchor on a way to it


def dynamic_target(document: Document, place: int) -> int:
    """Where the $dynamicRef of a place leads, if that is the same however the place is come to."""
    node = document.nodes[place]
    assert isinstance(node.schema, dict)
    reference = node.schema["$dynamicRef"]
    start = document.lookup(reference, "$dynamicRef", node.pointer)
    uri, name = split_uri(reference)
    found = document.dynamic.get(name, {})
    if found.get(document.resources[uri]) != start or len(found) == 1:
        return start
    # Evaluation begins in the root, which so is the outermost. In draft 2019-09, whose anchors have no name,
    # a resource on the way without one may be read as an end of it.
    if 0 in found and (name or len(found) == len(set(document.resources.values()))):
        return found[0]
    if name and name not in document.ways:
        document.ways[name] = outermost(document, name)
    resources = document.ways[name].get(place, set()) if name else set()
    if len(resources) != 1:
        why = f"which schema of this anchor {shown(reference)} means depends on the way to it; use $ref"
        refuse("$dynamicRef", step(node.pointer, "$dynamicRef"), why)
    (resource,) = resources
    return start if resource is None else found[resource]


def outermost(document: Document, name: str) -> dict[int, set[int | None]]:
    """By place, the outermost resources with the $dynamicAnchor `name` on ways to it; {} if there are too
    many ways to tell."""
    found = document.dynamic[name]
    start = _stepped((0, None), 0, document, found)
    seen, waiting = {start}, [start]
    while waiting:
        way = waiting.pop()
        for place in _next(document, way, name):
            further = _stepped(way, place, document, found)
            if further not in seen:
                seen.add(further)
                waiting.append(further)
        if len(seen) > MAX_WAYS:
            return {}
    out: dict[int, set[int | None]] = {}
    for place, resource in seen:
        out.setdefault(place, set()).add(resource)
    return out


def _stepped(way: Way, place: int, document: Document, found: dict[int, int]) -> Way:
    resource = document.resource_of.get(place)
    entered = resource if resource in found else None
    return place, entered if way[1] is None else way[1]


def _next(document: Document, way: Way, name: str) -> list[int]:
    """The places that evaluation may go on to."""
    place, resource = way
    node = document.nodes[place]
    out = list(node.children.values())
    for keyword in ("$ref", "$dynamicRef"):
        if not isinstance(node.schema, dict) or keyword not in node.schema:
            continue
        try:
            first = document.lookup(node.schema[keyword], keyword, node.pointer)
        except SchemaRefused:  # said when the reference is followed
            continue
        anchor = split_uri(node.schema[keyword])[1]
        others = document.dynamic.get(anchor, {}) if keyword == "$dynamicRef" else {}
        if first not in others.values():
            out.append(first)
        elif anchor == name:
            out.append(first if resource is None else others[resource])
        else:
            out += others.values()
    return out
