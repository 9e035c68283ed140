"""Computes the model's confidence in each field of a JSON answer, from the answer's tokens."""

from collections import deque
from collections.abc import Callable, Sequence

from mmengine.models.plugin import Tokenizer
from mmengine.request import GrammarRequest
from mmengine.structured_output.field_confidence.fields import FieldConfidence, field_confidences
from mmengine.structured_output.grammar_start import find_end
from mmengine.token_confidence import TokenConfidence

# A cache of four tokenizers, each with a function that returns a token's bytes. Reading the bytes of all
# tokens takes 0.1 s.
_known: deque[tuple[Tokenizer, Callable[[int], bytes]]] = deque(maxlen=4)


def answer_confidence(
    tokenizer: Tokenizer,
    grammar: GrammarRequest | None,
    token_ids: Sequence[int],
    confidences: Sequence[TokenConfidence] | None,
    after: tuple[int, ...],
) -> dict[str, FieldConfidence] | None:
    """Return the confidence of each field by JSON pointer, or None if the request does not ask for
    confidences.

    `token_ids`: all tokens in the answer, including reasoning. `after`: the tokens that end the reasoning.
    `confidences`: an entry for each token that this engine sampled. The answer's first tokens
    have no entry if another engine sampled them.
    """
    if grammar is None or not grammar.field_confidence or confidences is None:
        return None
    start = find_end(token_ids, after) if after else 0
    if start is None:  # the reasoning did not end
        return {}
    unknown: list[TokenConfidence | None] = [None] * (len(token_ids) - len(confidences))
    found = [*unknown, *confidences][start:]
    return field_confidences(grammar.source, token_ids[start:], found, _bytes_of(tokenizer))


def _bytes_of(tokenizer: Tokenizer) -> Callable[[int], bytes]:
    """Return a function that returns a token's bytes, b"" for a special token."""
    for known, found in tuple(_known):
        if known is tokenizer:
            return found
    pieces, special = tokenizer.token_bytes(), tokenizer.special_ids

    def bytes_of(token: int) -> bytes:
        return b"" if token in special or token >= len(pieces) else pieces[token]

    _known.append((tokenizer, bytes_of))
    return bytes_of
