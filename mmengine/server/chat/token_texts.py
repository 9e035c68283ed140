"""Converts single tokens to text and bytes, for logprobs."""

from functools import lru_cache

from mmengine.errors import ModelError
from mmengine.models.plugin import Tokenizer

LEAST_LOGPROB = -9999.0  # Replaces -inf, which JSON cannot represent. vLLM uses the same value.
_KEPT = 4096  # Number of tokens whose texts are cached.


class TokenTexts:
    """Converts single tokens to texts and bytes. The constructor reads the whole vocabulary."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self.special_ids = tokenizer.special_ids  # Tokens that are not part of an answer's text.
        try:
            self._bytes = tokenizer.token_bytes()
        except ModelError:  # The tokenizer cannot convert tokens to bytes.
            self._bytes = []
        self.of = lru_cache(maxsize=_KEPT)(self._of)

    def _of(self, token: int) -> tuple[str, bytes]:
        """Return a token's text and bytes. In the text, U+FFFD replaces incomplete characters."""
        if token < len(self._bytes):
            data = self._bytes[token]
        else:
            data = self._tokenizer.decode([token], skip_special_tokens=False).encode()
        return data.decode(errors="replace"), data


def clip_logprob(logprob: float) -> float:
    """Return `logprob`, or LEAST_LOGPROB if `logprob` is smaller."""
    # The comparison is false for NaN, so NaN becomes LEAST_LOGPROB too.
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB
