"""Computes each field's confidence in a JSON answer (see docs/how-to/structured_output.md)."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

import msgspec

from mmengine.structured_output.field_confidence.others import (
    CONTINUES_NUMBER,
    OtherValue,
    Step,
    first_choice,
    is_number,
    other_values,
)
from mmengine.structured_output.field_confidence.schema_values import Scalar, values_at
from mmengine.structured_output.field_confidence.spans import Span, value_spans
from mmengine.structured_output.json_pointer import join_pointer
from mmengine.token_confidence import TokenConfidence


class FieldConfidence(msgspec.Struct, frozen=True):
    """How confident the model was in a field's value.

    `p`: the product of the probabilities of the value's tokens; for a number, the probability that the number
    ends may be a further factor. `min`: the smallest of these probabilities.
    `entropy`: the entropy in nats at the first token that decides the value. `others`: other likely values.
    """

    p: float
    min: float
    entropy: float
    others: tuple[OtherValue, ...] = ()


def field_confidences(
    source: str,
    token_ids: Sequence[int],
    confidences: Sequence[TokenConfidence | None],
    bytes_of: Callable[[int], bytes],
) -> dict[str, FieldConfidence]:
    """Return the confidence of each field in an answer by JSON pointer.

    `source`: the normalized schema. `token_ids`: the answer's tokens, beginning with the JSON text.
    `confidences`: each token's confidence, or None for a token that another engine sampled. A field with
    such a token is left out. `bytes_of`: returns a token's bytes, b"" for a special token.
    """
    pieces = [bytes_of(token) for token in token_ids]
    ends = list(accumulate(map(len, pieces)))
    text = b"".join(pieces)
    found = {}
    for span in value_spans(text):
        steps = _steps(span, pieces, ends, confidences, bytes_of)
        if steps is not None:
            names = values_at(source, span.path)
            found[join_pointer("", *span.path)] = _confidence(text, span, steps, names)
    return found


def _steps(
    span: Span,
    pieces: Sequence[bytes],
    ends: Sequence[int],
    confidences: Sequence[TokenConfidence | None],
    bytes_of: Callable[[int], bytes],
) -> list[Step] | None:
    """Return the tokens that contain bytes of the value. If the last token ends exactly where the value ends,
    also return the next token, because another token at this position could have continued the value.

    Returns None if a token with bytes of the value has no confidence.
    """
    first = bisect_right(ends, span.start)
    last = bisect_left(ends, span.end)
    stop = last + 2 if ends[last] == span.end else last + 1
    steps = []
    for place in range(first, min(stop, len(pieces))):
        confidence = confidences[place]
        if confidence is None:
            if place > last:
                break
            return None
        likely = [(bytes_of(token), math.exp(logprob)) for token, logprob in confidence.likely]
        is_value = place <= last
        steps.append(Step(ends[place] - len(pieces[place]), ends[place], confidence, likely, is_value))
    return steps


def _confidence(text: bytes, span: Span, steps: Sequence[Step], names: Sequence[Scalar]) -> FieldConfidence:
    logprobs = [step.confidence.logprob for step in steps if step.is_value and not step.confidence.is_forced]
    after = steps[-1]
    if not after.is_value and is_number(text[span.start : span.end]):
        logprobs += _number_end(after)
    choice = first_choice(text, span, steps)
    return FieldConfidence(
        p=math.exp(math.fsum(logprobs)),
        min=math.exp(min(logprobs, default=0.0)),
        entropy=0.0 if choice is None else choice.confidence.entropy,
        others=other_values(text, span, steps, names),
    )


def _number_end(after: Step) -> list[float]:
    """Return [logprob that the number ends here], or [] if no likely token continues the number."""
    if after.confidence.is_forced:
        return []
    mass = math.fsum(p for data, p in after.likely if data[:1] and data[0] in CONTINUES_NUMBER)
    return [max(math.log1p(-min(mass, 1 - 1e-12)), after.confidence.logprob)] if mass else []
