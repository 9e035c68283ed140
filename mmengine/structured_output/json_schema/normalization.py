"""The gate: a JSON Schema in, a schema that the grammar engine enforces exactly out.

    text or dict ──► reading.py    read with limits, in the words of 2020-12 (drafts.py), references resolved
                 ──► shapes.py     $ref, allOf, anyOf, oneOf … worked into shapes (rewrite.py, pieces.py)
                 ──► satisfiable.py  nothing satisfies it, or recursion has no base: refused
                 ──► emit.py       written as the part of JSON Schema that is enforced exactly, bounded

Nothing is dropped in silence: a keyword is enforced, or refused with its name and JSON pointer, or it is an
annotation, as unknown keywords and formats are by the specification: those are listed in the notes.
"""

import gc
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import msgspec

from mmengine.structured_output.json_schema.emission.bounds import Bounds
from mmengine.structured_output.json_schema.emission.emitter import Emitter
from mmengine.structured_output.json_schema.patterns.character_sets import PatternError
from mmengine.structured_output.json_schema.reading.reader import Given, read
from mmengine.structured_output.json_schema.rewriting.negation import NARROW
from mmengine.structured_output.json_schema.rewriting.satisfiability import Satisfiable
from mmengine.structured_output.json_schema.rewriting.shapes import Shapes
from mmengine.structured_output.json_schema.vocabulary.notes import NormalizedSchema, Note
from mmengine.structured_output.json_schema.vocabulary.refusal import SchemaRefused, refuse

__all__ = ["MAX_OUTPUT", "Bounds", "NormalizedSchema", "Note", "SchemaRefused", "normalize_schema"]

MAX_OUTPUT = 8 * 2**20  # bytes of what the grammar engine is given

_collector_lock = threading.Lock()
_num_pauses = 0  # callers that want the collector paused now
_was_enabled = False


def normalize_schema(
    schema: Given,
    bounds: Bounds = Bounds(),  # noqa: B008 (it is frozen)
    schemas: Mapping[str, object] | None = None,
    strict_keywords: bool = False,
) -> NormalizedSchema:
    """The schema for the grammar engine, as JSON text, complete in itself, with notes on it; the same input,
    the same text.

    `schema`: a JSON Schema as a dict (or true, false) or as JSON text. SchemaRefused (an InvalidRequest)
    names the keyword and the JSON pointer of what is invalid, contradictory, or cannot be enforced exactly.
    `schemas`: documents that its references may lead to, by URI; nothing is ever fetched. `strict_keywords`:
    unknown keywords are refused; else they are annotations, and the notes name them.
    """
    with paused_collection():
        return _normalize(schema, bounds, schemas, strict_keywords)


def _normalize(
    schema: Given, bounds: Bounds, schemas: Mapping[str, object] | None, strict_keywords: bool
) -> NormalizedSchema:
    root = (0,)
    document = read(schema, schemas, strict_keywords)
    satisfiable = Satisfiable(Shapes(document))
    emitter = Emitter(satisfiable, bounds)
    try:
        satisfiable.work_out(root)
        body = emitter.schema(root)
    except RecursionError:
        refuse("", "", "its references and alternatives are nested too deep")
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
        refuse("", "", "it holds half a surrogate pair, which is no text")
    if len(text) > MAX_OUTPUT:
        refuse("", "", f"worked out, it has more than {MAX_OUTPUT:,} bytes")
    narrow = tuple(
        Note(origin.keyword, f"#{origin.pointer}", f"{origin.trouble} is enforced more narrowly: {NARROW}")
        for origin in satisfiable.shapes.narrow_at
    )
    narrow = (*document.narrower.all(), *narrow, *emitter.orders.narrow.all())
    return NormalizedSchema(text.decode(), document.notes.all(), narrow, emitter.orders.bound.all())


@contextmanager
def paused_collection() -> Iterator[None]:
    """Pause Python's cyclic garbage collector, which all threads share, until the last caller is done.

    A large schema becomes a hundred thousand objects that live until its normalization ends. The collector
    would traverse them and every other object in the process again and again. Each traversal takes a tenth of
    a second, during which no other thread runs, an event loop's thread included.
    """
    global _num_pauses, _was_enabled
    with _collector_lock:
        if not _num_pauses:
            _was_enabled = gc.isenabled()
            gc.disable()
        _num_pauses += 1
    try:
        yield
    finally:
        with _collector_lock:
            _num_pauses -= 1
            if not _num_pauses and _was_enabled:
                gc.enable()
