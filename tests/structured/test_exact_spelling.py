"""Tests that forced text which the tokenizer normalises, or Lark cannot hold, is generated as it stands."""

import json
import unicodedata

import pytest

from mmengine.request import GrammarRequest
from mmengine.structured_output.engines.llguidance.backend import LLGuidance

TEXTS = [
    "\u2126",  # ohm sign
    "5 \u212b and \u212a.",  # angstrom and kelvin signs
    unicodedata.normalize("NFD", "Ärger naïf é.txt"),
    "a\u0323\u0307 d\u0307\u0323",  # reordered marks
    "\u1112\u1161\u11ab\u1100\u1173\u11af",  # Hangul jamo
    "\u09c7\u09be",  # Bengali vowels that compose
    "plain é 한글 Ω",
    "a\x7fb",
]
TOKENS = [*(bytes([byte]) for byte in range(256)), "é".encode(), "Ω".encode(), b"rger", b"txt", b"<end>"]
END = len(TOKENS) - 1


def encode(text: str) -> list[int]:
    """Encode as Qwen's tokenizers: NFC first, then the longest tokens."""
    data, out = unicodedata.normalize("NFC", text).encode(), []
    while data:
        token = max((t for t in range(END) if data.startswith(TOKENS[t])), key=lambda t: len(TOKENS[t]))
        out.append(token)
        data = data[len(TOKENS[token]) :]
    return out


@pytest.fixture(scope="module")
def backend() -> LLGuidance:
    return LLGuidance(lambda: TOKENS, encode, frozenset({END}), [END], len(TOKENS), 1)


def generated(backend: LLGuidance, grammar: GrammarRequest) -> str:
    """Return the only text of a grammar, taking forced tokens as a step does."""
    matcher, out = backend.compile(grammar).matcher(), []
    while not matcher.is_stopped():
        mask = matcher.compute_bitmask()
        allowed = [token for token in range(len(TOKENS)) if mask[token >> 3] >> (token & 7) & 1]
        if allowed == [END]:
            break
        last = out[-1] if out else -1
        forced = backend.forced(matcher, last)
        assert not forced or allowed == forced[:1]
        token = (forced or sorted(allowed))[0]
        assert backend.allows(matcher, token) and backend.take(matcher, token, last)
        out.append(token)
    return b"".join(TOKENS[token] for token in out).decode()


@pytest.mark.parametrize("text", TEXTS)
def test_forced_text_is_generated_as_it_stands(backend, text):
    whole = json.dumps(text, ensure_ascii=False)
    grammars = {
        "choice": json.dumps([text]),
        "lark": f"start: {whole}".replace("\x7f", "\\u007f"),
        "regex": text.replace(".", "[.]"),
        "json_schema": json.dumps({"x-guidance": {"whitespace_flexible": False}, "const": text}),
    }
    for kind, source in grammars.items():
        said = generated(backend, GrammarRequest(kind, source))
        assert said == text or kind == "json_schema" and json.loads(said) == text, kind
