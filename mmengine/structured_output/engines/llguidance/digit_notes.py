"""Note that a grammar limits the digits of numbers that its schemas leave unlimited."""

from functools import lru_cache

import msgspec

from mmengine.request import GrammarRequest
from mmengine.structured_output.engines.llguidance.json_schema_lark import limits_digits
from mmengine.structured_output.json_schema.vocabulary.notes import Note
from mmengine.structured_output.request.spec import HAS_JSON, JsonSchema, read_grammar
from mmengine.structured_output.request.structural_tags import StructuralTag
from mmengine.structured_output.request.tool_calls import ToolCalls


def digit_notes(grammar: GrammarRequest) -> tuple[Note, ...]:
    """Return the note on a maximum number of digits; nothing if the grammar has none."""
    if not grammar.max_digits or grammar.kind not in HAS_JSON or not _is_limited(grammar):
        return ()
    text = (
        f"numbers without a maximum or multipleOf have at most {grammar.max_digits} digits; 0 in "
        "bounds.max_digits or --max-digits turns this limit off"
    )
    return (Note("", "#", text),)


@lru_cache(maxsize=64)
def _is_limited(grammar: GrammarRequest) -> bool:
    found = read_grammar(grammar)
    schemas: list[msgspec.Raw] = []
    match found:
        case JsonSchema(schema=schema):
            schemas = [schema]
        case StructuralTag(structures=structures):
            schemas = [each.schema for each in structures]
        case ToolCalls():
            schemas = [each.schema for each in found.tools] + ([found.answer] if found.has_form else [])
    return any(limits_digits(bytes(schema).decode()) for schema in schemas)
