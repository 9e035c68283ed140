"""Rewrites a JSON Schema to a JSON Schema that a grammar engine enforces exactly.

    text or dict ──► reading/    read with limits, translate to draft 2020-12, resolve references
                 ──► rewriting/  expand $ref, allOf, anyOf, oneOf … into shapes (constraints/)
                 ──► rewriting/satisfiability.py  refuse a schema without values, or recursion without a base
                 ──► emission/   write the JSON Schema subset that is enforced exactly, within the bounds

A keyword is enforced, or refused with its name and JSON pointer, or is an annotation. Unknown keywords and
formats are annotations by the specification, and the notes list them.
"""

from collections.abc import Mapping

import msgspec

from mmengine.paused_collection import paused_collection
from mmengine.structured_output.json_schema.emission.bounds import Bounds
from mmengine.structured_output.json_schema.emission.emitter import Emitter
from mmengine.structured_output.json_schema.patterns.character_sets import PatternError
from mmengine.structured_output.json_schema.reading.reader import SchemaInput, read_schema
from mmengine.structured_output.json_schema.rewriting.negation import OMITTED_ALTERNATIVES
from mmengine.structured_output.json_schema.rewriting.satisfiability import Satisfiable
from mmengine.structured_output.json_schema.rewriting.shapes import Shapes
from mmengine.structured_output.json_schema.vocabulary.notes import NormalizedSchema, Note
from mmengine.structured_output.json_schema.vocabulary.refusal import SchemaRefused, refuse
from mmengine.structured_output.json_schema.work import WorkExceeded, limited_work

__all__ = ["MAX_OUTPUT", "Bounds", "NormalizedSchema", "Note", "SchemaRefused", "normalize_schema"]

MAX_OUTPUT = 8 * 2**20  # Maximum size of a normalized schema in bytes.


def normalize_schema(
    schema: SchemaInput,
    bounds: Bounds = Bounds(),  # noqa: B008 (it is frozen)
    schemas: Mapping[str, object] | None = None,
    strict_keywords: bool = False,
) -> NormalizedSchema:
    """Return the schema for the grammar engine as self-contained JSON text, with notes.

    Equal inputs always give equal texts.

    `schema` is a JSON Schema as a dict (or true, false) or as JSON text. `schemas` maps URIs to the documents
    that references may use; no document is fetched. With `strict_keywords`, unknown keywords are refused.
    Raises SchemaRefused (an InvalidRequest) with the keyword and the JSON pointer if a part is invalid,
    contradictory or cannot be enforced exactly.
    """
    with paused_collection(), limited_work():
        try:
            return _normalize(schema, bounds, schemas, strict_keywords)
        except WorkExceeded as error:
            why = "its alternatives and patterns take too long to compare; use fewer, or simpler ones"
            refuse(error.keyword, error.pointer, why)


def _normalize(
    schema: SchemaInput, bounds: Bounds, schemas: Mapping[str, object] | None, strict_keywords: bool
) -> NormalizedSchema:
    root = (0,)
    document = read_schema(schema, schemas, strict_keywords)
    satisfiable = Satisfiable(Shapes(document))
    emitter = Emitter(satisfiable, bounds)
    try:
        satisfiable.solve(root)
        body = emitter.schema(root)
    except RecursionError:
        refuse("", "", "references and alternatives are nested too deeply")
    except PatternError as error:
        refuse("patternProperties", "", str(error))
    options: dict[str, object] = {}
    if bounds.whitespace:
        options["whitespace_pattern"] = f"[\\x20\\x0A\\x0D\\x09]{{1,{bounds.whitespace}}}"
    if emitter.plain_escapes:
        options["json_allowed_escapes"] = 'nrbtf\\"'
    else:
        options["json_allow_general_unicode_escapes"] = True
    try:
        text = msgspec.json.encode({"x-guidance": options, **({} if body is True else body)})
    except UnicodeEncodeError:
        refuse("", "", "contains half a surrogate pair, which is not valid text")
    if len(text) > MAX_OUTPUT:
        refuse("", "", f"the normalized schema has more than {MAX_OUTPUT:,} bytes")
    narrow = tuple(
        Note(
            origin.keyword,
            f"#{origin.pointer}",
            f"{origin.trouble} is enforced more narrowly: {OMITTED_ALTERNATIVES}",
        )
        for origin in satisfiable.shapes.narrow_at
    )
    narrow = (*document.narrowings.all(), *narrow, *emitter.orders.narrow.all())
    return NormalizedSchema(text.decode(), document.notes.all(), narrow, emitter.orders.bound.all())
