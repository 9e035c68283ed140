"""Finds and rewrites errors that llguidance reports for a grammar before any text is generated."""

import msgspec
import numpy as np
from llguidance import LLMatcher

from mmengine.structured_output.engines.engine_errors import describe_error
from mmengine.structured_output.json_schema.vocabulary.refusal import SchemaRefused


def refuse_overlap(grammar: str, error: str) -> None:
    """Raise SchemaRefused if the error says that a key may match two patterns in an object.

    The refusal has the object's JSON pointer, which normalization has written into the object's `$comment`.
    """
    if not error.startswith("patternProperty regexes"):
        return
    waiting: list[object] = [msgspec.json.decode(grammar)]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            texts = each.get("patternProperties", ()) if "$comment" in each else ()
            if sum(f"/{text}/" in error for text in texts) > 1:
                why = f"{describe_error(error)}; let no key match both"
                raise SchemaRefused("patternProperties", each["$comment"], why)
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each


def first_step_error(matcher: LLMatcher) -> str:
    """Return the error that a first step with this grammar would have, or "".

    The client then sees the error before the model runs. Causes are a grammar without texts, endless
    recursion, and a first step that exceeds the limits.
    """
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    if matcher.is_error():
        return matcher.get_error()
    ahead, allowed = matcher.deep_copy(), np.flatnonzero(bits)
    if len(allowed):
        first = int(allowed[0])
        ahead.consume_token(8 * first + int(np.flatnonzero(np.unpackbits(bits[first], bitorder="little"))[0]))
        if not ahead.is_error() and not ahead.is_stopped():
            ahead.compute_bitmask()
    return ahead.get_error() if ahead.is_error() else ""
