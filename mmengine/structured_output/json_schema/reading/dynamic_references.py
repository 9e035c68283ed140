"""Resolves a $dynamicRef to a $dynamicAnchor. If several resources on the evaluation path have this anchor,
the outermost resource is used.

An evaluation path begins at the root and follows subschemas and references. If all paths to the $dynamicRef
have the same outermost resource, the target is unique, and the keyword is treated like a `$ref`. Otherwise
the schema is refused.
"""

from mmengine.structured_output.json_pointer import join_pointer
from mmengine.structured_output.json_schema.reading.document import Document, split_uri
from mmengine.structured_output.json_schema.vocabulary.keywords import show_value
from mmengine.structured_output.json_schema.vocabulary.refusal import SchemaRefused, refuse

MAX_WAYS = 100_000  # Maximum number of (subschema, outermost resource) pairs for an anchor.

# (index of a subschema, outermost resource with the anchor on a path to the subschema).
Way = tuple[int, int | None]


def dynamic_target(document: Document, place: int) -> int:
    """Return the target of the $dynamicRef in the subschema with index `place`.

    Refuses the schema if the target depends on the evaluation path.
    """
    node = document.nodes[place]
    assert isinstance(node.schema, dict)
    reference = node.schema["$dynamicRef"]
    start = document.lookup(reference, "$dynamicRef", node.pointer)
    uri, name = split_uri(reference)
    found = document.dynamic.get(name, {})
    if found.get(document.resources[uri]) != start or len(found) == 1:
        return start
    # If the root has the anchor, the root is always the outermost resource. In draft 2019-09, anchors have no
    # name, and a resource without an anchor ends the search. In this draft, the root is therefore the target
    # only if every resource has an anchor.
    if 0 in found and (name or len(found) == len(set(document.resources.values()))):
        return found[0]
    if name and name not in document.ways:
        document.ways[name] = outermost_resources(document, name)
    resources = document.ways[name].get(place, set()) if name else set()
    if len(resources) != 1:
        why = f"the target of {show_value(reference)} depends on the evaluation path; use $ref"
        refuse("$dynamicRef", join_pointer(node.pointer, "$dynamicRef"), why)
    (resource,) = resources
    return start if resource is None else found[resource]


def outermost_resources(document: Document, name: str) -> dict[int, set[int | None]]:
    """Return each subschema's outermost resources with the $dynamicAnchor `name`, over all paths to the
    subschema.

    None stands for a path without such a resource. The result is empty if there are too many paths.
    """
    found = document.dynamic[name]
    start = _follow_step((0, None), 0, document, found)
    seen, waiting = {start}, [start]
    while waiting:
        way = waiting.pop()
        for place in _next(document, way, name):
            further = _follow_step(way, place, document, found)
            if further not in seen:
                seen.add(further)
                waiting.append(further)
        if len(seen) > MAX_WAYS:
            return {}
    out: dict[int, set[int | None]] = {}
    for place, resource in seen:
        out.setdefault(place, set()).add(resource)
    return out


def _follow_step(way: Way, place: int, document: Document, found: dict[int, int]) -> Way:
    resource = document.resource_of.get(place)
    entered = resource if resource in found else None
    return place, entered if way[1] is None else way[1]


def _next(document: Document, way: Way, name: str) -> list[int]:
    """Return the subschemas that evaluation may visit next."""
    place, resource = way
    node = document.nodes[place]
    out = list(node.children.values())
    for keyword in ("$ref", "$dynamicRef"):
        if not isinstance(node.schema, dict) or keyword not in node.schema:
            continue
        try:
            first = document.lookup(node.schema[keyword], keyword, node.pointer)
        except SchemaRefused:  # The error is reported when the reference is followed.
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
