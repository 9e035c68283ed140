"""A token's confidence: its logprob in the distribution over the tokens that the grammar allowed, and this
distribution's entropy and likeliest tokens. The event EXECUTED and the engine's outputs store a confidence
after the token's logprobs, as pairs with negative numbers in place of token ids. The pairs are (LOGPROB, the
token's logprob), (ENTROPY, the entropy), and (FIRST_LIKELY - token, its logprob) for the likeliest allowed
tokens, the best first. A forced token (the only allowed token) has no FIRST_LIKELY pairs.
"""

from collections.abc import Sequence
from typing import NamedTuple

LOGPROB, ENTROPY, FIRST_LIKELY = -1, -2, -3
NUM_LIKELY = 8  # Number of likeliest allowed tokens in a confidence.

Entry = tuple[tuple[int, float], ...]


class TokenConfidence(NamedTuple):
    """`logprob` and `entropy` (nats) belong to the distribution at temperature 1 over the allowed tokens.

    `likely`: the NUM_LIKELY likeliest allowed tokens with their logprobs, the best first; () for a forced
    token.
    """

    logprob: float
    entropy: float
    likely: tuple[tuple[int, float], ...] = ()

    @property
    def is_forced(self) -> bool:
        return not self.likely


def pairs_of(confidence: TokenConfidence) -> list[tuple[int, float]]:
    """Return the pairs by which events and outputs store `confidence`."""
    likely = [(FIRST_LIKELY - token, logprob) for token, logprob in confidence.likely]
    return [(LOGPROB, confidence.logprob), (ENTROPY, confidence.entropy), *likely]


def split_entry(entry: Sequence[tuple[int, float]]) -> tuple[Entry, TokenConfidence | None]:
    """Return a token's logprobs, and its confidence or None."""
    at = next((place for place, (token, _) in enumerate(entry) if token < 0), None)
    if at is None:
        return tuple(entry), None
    (_, logprob), (_, entropy), *likely = entry[at:]
    found = tuple((FIRST_LIKELY - token, logprob) for token, logprob in likely)
    return tuple(entry[:at]), TokenConfidence(logprob, entropy, found)


def split_entries(
    entries: Sequence[Sequence[tuple[int, float]]] | None,
) -> tuple[list[Entry] | None, list[TokenConfidence] | None]:
    """Return the list of all tokens' logprobs and the list of their confidences, each None if the request
    did not ask for these values.
    """
    if not entries:
        return (None if entries is None else []), None
    split = [split_entry(entry) for entry in entries]
    confidences = [confidence for _, confidence in split if confidence is not None]
    logprobs = [logprobs for logprobs, _ in split]
    return (logprobs if any(logprobs) else None), (confidences or None)
