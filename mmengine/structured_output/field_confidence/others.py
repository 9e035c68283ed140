"""Computes other possible values for a field from the most likely tokens at each position."""

import json
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from mmengine.structured_output.field_confidence.schema_values import Scalar
from mmengine.structured_output.field_confidence.spans import Span
from mmengine.token_confidence import TokenConfidence

SHORT = 32  # A value with at most this many bytes of JSON text is short.
MAX_OTHERS = 16
LEAST_P = 1e-4  # Minimum probability for the beginning of another value.
CONTINUES_NUMBER = frozenset(b"0123456789.eE+-")
_DIGITS = frozenset(b"0123456789")
_SPACE = b" \t\r\n"


class OtherValue(msgspec.Struct, frozen=True):
    """Another possible value, or a beginning of other values. Either `value` or `begins` is UNSET.

    `value`: the other value. `p` is then the total probability of the tokens that lead to this value, at the
    first position where the answer's token excludes the value. `begins`: JSON text up to and including the
    first token that differs from the answer, with U+FFFD for incomplete characters. `p` is then the token's
    probability.
    """

    p: float
    value: Scalar | UnsetType = UNSET
    begins: str | UnsetType = UNSET


class Step(NamedTuple):
    """A token in the answer. The token has the bytes from `start` to `end` in the JSON text. `likely`:
    (bytes, probability) for the most likely allowed tokens at this position. `is_value`: whether the token
    contains bytes from the value.
    """

    start: int
    end: int
    confidence: TokenConfidence
    likely: Sequence[tuple[bytes, float]]
    is_value: bool


def other_values(
    text: bytes, span: Span, steps: Sequence[Step], names: Sequence[Scalar]
) -> tuple[OtherValue, ...]:
    """Return other possible values for the field at `span`, most likely first.

    `names`: the values that the schema lists for the field. Without such values, the result has beginnings of
    other values if the field's value is short. `steps`: the value's tokens and the next token.
    """
    value = text[span.start : span.end]
    if names:
        texts = [(name, _text_of(name)) for name in names]
        found = [
            OtherValue(_mass_of(other, text, span, steps), value=name)
            for name, other in texts
            if other != value
        ]
    elif len(value) <= SHORT:
        found = _beginnings(text, span, steps)
    else:
        return ()
    return tuple(sorted(found, key=lambda each: -each.p)[:MAX_OTHERS])


def is_number(value: bytes) -> bool:
    return value[-1] in _DIGITS


def _text_of(value: Scalar) -> bytes:
    """Return a value's shortest JSON text."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="surrogatepass")


def _differs(rest: bytes, value: bytes, of_number: bool) -> bool:
    """Return whether two texts with a common prefix certainly have different values. The first text continues
    with `rest`, which may be incomplete, and the second text with `value`. `of_number`: whether the second
    text is a number.
    """
    if value.startswith(rest):
        return False
    if not rest.startswith(value):
        return True
    return of_number and rest[len(value)] in CONTINUES_NUMBER


def _mass_of(other: bytes, text: bytes, span: Span, steps: Sequence[Step]) -> float:
    """Find the first token in the answer that excludes the value `other`. Return the total probability of the
    likely tokens at this position that lead to `other`.
    """
    value = text[span.start : span.end]
    for step in steps:
        at = max(step.start - span.start, 0)
        if not other.startswith(value[:at]):
            return 0.0  # The texts differ within an earlier token.
        if step.end <= span.end and other.startswith(value[: step.end - span.start]):
            continue
        return math.fsum(
            p
            for rest, p in _rests(text, span, step)
            if _differs(rest, value[at:], is_number(value))
            and not _differs(rest, other[at:], is_number(other))
        )
    return 0.0


def first_choice(text: bytes, span: Span, steps: Sequence[Step]) -> Step | None:
    """Return the first token for which another likely token would lead to another value, or None."""
    value = text[span.start : span.end]
    for step in steps:
        at = max(step.start - span.start, 0)
        rests = _rests(text, span, step)
        if any(_differs(rest, value[at:], is_number(value)) for rest, _ in rests):
            return step
    return None


def _beginnings(text: bytes, span: Span, steps: Sequence[Step]) -> list[OtherValue]:
    """Return beginnings of other values. All end at the first position where a likely token leads to another
    value.
    """
    value = text[span.start : span.end]
    for step in steps:
        at = max(step.start - span.start, 0)
        found = [
            OtherValue(p, begins=(value[:at] + rest).decode(errors="replace"))
            for rest, p in _rests(text, span, step)
            if p >= LEAST_P and _differs(rest, value[at:], is_number(value))
        ]
        if found:
            return found
    return []


def _rests(text: bytes, span: Span, step: Step) -> Iterator[tuple[bytes, float]]:
    """Yield (the token's bytes in the value, probability) for each likely token. If the step's token has
    bytes before the value, only tokens with the same prefix count. White space in the prefix is ignored.
    """
    before = text[step.start : span.start].translate(None, _SPACE) if step.start <= span.start else None
    for data, p in step.likely:
        rest = data if before is None else _after(before, data)
        if rest:
            yield rest, p


def _after(before: bytes, data: bytes) -> bytes:
    """Return the bytes in `data` after the prefix `before`, ignoring white space. Returns b"" if `data` lacks
    the prefix.
    """
    for byte in before:
        data = data.lstrip(_SPACE)
        if data[:1] != bytes((byte,)):
            return b""
        data = data[1:]
    return data.lstrip(_SPACE)
