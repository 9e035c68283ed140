"""Finds llguidance's errors for a grammar before the model runs, and rewrites the messages."""

import msgspec
import numpy as np
from llguidance import LLMatcher

from mmengine.structured_output.engines.engine_errors import describe_error
from mmengine.structured_output.json_schema.vocabulary.refusal import SchemaRefused


def refuse_overlap(grammar: str, error: str) -> None:
    """Raise SchemaRefused if `error` says that a key may match two patterns in an object.

    Reads the object's JSON pointer from `$comment`, where normalization has stored it.
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
    """Return the error that the first step would raise with this grammar, or "".

    Causes are a grammar that matches no text, endless recursion, and a first step that exceeds the limits.
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
