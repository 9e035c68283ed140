"""Check which texts a schema's grammar accepts, and generate random accepted texts."""

import random

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from mmengine.structured_output.engines.llguidance.backend import LLGuidance
from mmengine.structured_output.engines.llguidance.json_schema_lark import schema_grammar
from mmengine.structured_output.json_schema.normalization import Bounds, normalize_schema
from mmengine.structured_output.matcher import Matcher

TOKENIZER = LLTokenizer("byte")
END = TOKENIZER.eos_token
CLOSING = frozenset(b'"]}')
# All bounds are off except Bounds.ordered, which has its default value. With the default, the grammar engine
# reads most schemas as JSON schemas. With keys in any order, it would read them as Lark grammars.
UNBOUND = Bounds(whitespace=0, decimals=0, digits=0, max_digits=0)


class Grammar:
    def __init__(self, schema: dict | bool | str, bounds: Bounds | None = None):
        made = normalize_schema(schema, bounds or UNBOUND)
        self.text, self.narrow = made.text, made.narrow
        self.matcher = LLMatcher(TOKENIZER, schema_grammar(self.text), log_level=0)
        assert not self.matcher.is_error(), self.matcher.get_error()

    def accepts(self, text: str) -> bool:
        return accepts(self.matcher, text)

    def walk(self, source: random.Random, length: int) -> str | None:
        """Return a text of random allowed bytes, or None if the text has not ended after `length` bytes.

        Closing bytes become likelier as the text grows, so that most texts end.
        """
        matcher = self.matcher.deep_copy()
        out = bytearray()
        while len(out) < length:
            options = allowed(matcher)
            if END in options and (len(options) == 1 or source.random() < 0.3):
                return out.decode()
            options = [byte for byte in options if byte < 256]
            closing = [byte for byte in options if byte in CLOSING]
            if closing and source.random() < 0.1 + len(out) / length:
                options = closing
            byte = source.choice(options)
            assert matcher.consume_token(byte)
            out.append(byte)
        return None


def accepts(matcher: Matcher, text: str, end: int = END) -> bool:
    """Return whether the masks allow each byte of `text` in turn, and then the token `end`."""
    matcher = matcher.deep_copy()
    for byte in text.encode():
        if not _has(matcher.compute_bitmask(), byte) or not matcher.consume_token(byte):
            return False
    return _has(matcher.compute_bitmask(), end)


def _has(mask: bytes, token: int) -> bool:
    return mask[token >> 3] >> (token & 7) & 1 == 1


def byte_backend(num_threads: int | None = 1, end: bytes = b"") -> LLGuidance:
    """Return a backend with a token for each byte, and an end token whose bytes are `end`."""
    tokens = [*(bytes([byte]) for byte in range(256)), end]
    return LLGuidance(
        lambda: tokens, lambda text: list(text.encode()), frozenset({256}), [256], 257, num_threads
    )


def allowed(matcher: Matcher, last: int = END) -> list[int]:
    """Return the allowed tokens up to `last`."""
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    return bits[: last + 1].nonzero()[0].tolist()
