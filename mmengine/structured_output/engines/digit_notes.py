"""Writes notes for clients about the digit limit (max_digits) for numbers that the schema does not limit."""

from functools import lru_cache

import msgspec

from mmengine.request import GrammarRequest
from mmengine.structured_output.engines.unlimited_numbers import MAX_HELD, has_unlimited_numbers
from mmengine.structured_output.json_schema.vocabulary.notes import Note
from mmengine.structured_output.request.spec import HAS_JSON, JsonSchema, read_grammar
from mmengine.structured_output.request.structural_tags import StructuralTag
from mmengine.structured_output.request.tool_calls import ToolCalls


def digit_notes(grammar: GrammarRequest, counts_in_long: bool = False) -> tuple[Note, ...]:
    """Return the notes on a grammar's digit limit, or () without such a limit.

    `counts_in_long`: whether the grammar engine also limits digits in schemas with more than MAX_HELD
    characters. If not, a note says so.
    """
    if not grammar.max_digits or grammar.kind not in HAS_JSON:
        return ()
    is_limited, is_long = _limits_of(grammar)
    notes = []
    if is_limited or counts_in_long and is_long:
        notes.append(
            f"numbers without a maximum or multipleOf have at most {grammar.max_digits} digits; 0 in "
            "bounds.max_digits or --max-digits turns this limit off"
        )
    if is_long and not counts_in_long:
        notes.append(
            f"the schema has more than {MAX_HELD:,} characters in normalized form, so max_digits does not "
            "limit its numbers: give them a minimum and a maximum"
        )
    return tuple(Note("", "#", text) for text in notes)


@lru_cache(maxsize=64)
def _limits_of(grammar: GrammarRequest) -> tuple[bool, bool]:
    """Return whether any short schema has numbers without a limit, and whether any long schema has numbers.

    A short schema has at most MAX_HELD characters.
    """
    found = read_grammar(grammar)
    schemas: list[msgspec.Raw] = []
    match found:
        case JsonSchema(schema=schema):
            schemas = [schema]
        case StructuralTag(structures=structures):
            schemas = [each.schema for each in structures]
        case ToolCalls():
            schemas = [each.schema for each in found.tools] + ([found.answer] if found.has_form else [])
    texts = [bytes(schema).decode() for schema in schemas]
    long = [text for text in texts if len(text) > MAX_HELD]
    # Parsing a long schema would hold the GIL for too long. A text search is fast.
    is_long = any(f'"{kind}"' in text for text in long for kind in ("integer", "number"))
    return any(has_unlimited_numbers(text) for text in texts if text not in long), is_long
