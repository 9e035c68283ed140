"""Texts and bytes of single tokens, for logprobs."""

from functools import lru_cache

from mmengine.errors import ModelError
from mmengine.models.plugin import Tokenizer

LEAST_LOGPROB = -9999.0  # JSON has no infinity; vLLM's number
_KEPT = 4096  # tokens whose texts are kept


class TokenTexts:
    """Reads the whole vocabulary once, when it is made."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self.special_ids = tokenizer.special_ids  # which no text shows
        try:
            self._bytes = tokenizer.token_bytes()
        except ModelError:  # its tokens are no bytes
            self._bytes = []
        self.of = lru_cache(maxsize=_KEPT)(self._of)

    def _of(self, token: int) -> tuple[str, bytes]:
        """The text of a token alone, with U+FFFD for what is no whole character, and its bytes."""
        if token < len(self._bytes):
            data = self._bytes[token]
        else:
            data = self._tokenizer.decode([token], skip_special_tokens=False).encode()
        return data.decode(errors="replace"), data


def clip_logprob(logprob: float) -> float:
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB  # nor NaN
