"""Tests that forced text is generated unchanged, also text that the tokenizer would normalise or that a
Lark grammar cannot contain literally.
"""

import json
import re
import unicodedata
from functools import partial

import pytest

from mmengine.request import GrammarRequest
from mmengine.structured_output.engines.llguidance import backend as backend_module
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
    "ABC Straße \ufb01 \uff21 \u01c5 \u0130",  # A ligature, full width, title case, a dotted capital.
    "ABC abc",
    " two  spaces ",
    "\ufeff\u00ad\u200b",
]
TOKENS = [*(bytes([byte]) for byte in range(256)), "é".encode(), "Ω".encode(), b"rger", b"txt", b"<end>"]
END = len(TOKENS) - 1
NUMBERS = {each: token for token, each in enumerate(TOKENS)}
LONGEST = re.compile(b"|".join(map(re.escape, sorted(TOKENS[:END], key=len, reverse=True))), re.DOTALL)


def stripped(text: str) -> str:
    return "".join(each for each in unicodedata.normalize("NFD", text) if not unicodedata.combining(each))


NORMALIZERS = {
    "NFC": lambda text: unicodedata.normalize("NFC", text),  # Qwen's
    "NFD": lambda text: unicodedata.normalize("NFD", text),
    "NFKC": lambda text: unicodedata.normalize("NFKC", text),
    "NFKD": lambda text: unicodedata.normalize("NFKD", text),
    "lowercase": str.lower,
    "strip accents": stripped,
    "strip": str.strip,
    "prefix space": lambda text: " " + text,  # GPT-2's add_prefix_space
    "one space": lambda text: " ".join(text.split(" ")[:1] + [each for each in text.split(" ")[1:] if each]),
    "nothing": lambda text: "",
    "no controls": lambda text: "".join(
        each for each in text if unicodedata.category(each) not in ("Cf", "Cc")
    ),
}


def encode(text: str, normalize=NORMALIZERS["NFC"]) -> list[int]:
    """Encode the normalized text with the longest tokens."""
    data, out = normalize(text).encode(), []
    while data:
        token = max((t for t in range(END) if data.startswith(TOKENS[t])), key=lambda t: len(TOKENS[t]))
        out.append(token)
        data = data[len(TOKENS[token]) :]
    return out


@pytest.fixture(scope="module", params=NORMALIZERS)
def backend(request) -> LLGuidance:
    read = partial(encode, normalize=NORMALIZERS[request.param])
    return LLGuidance(lambda: TOKENS, read, frozenset({END}), [END], len(TOKENS), 1)


def generated(backend: LLGuidance, grammar: GrammarRequest) -> str:
    """Return the only text that the grammar allows. Consumes forced tokens as an engine step does."""
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


@pytest.mark.parametrize("unit", ["Hello one two. ", "é Ω ", "x", "a\u0323\u0307"])
def test_a_long_forced_text_is_encoded_in_parts(unit, monkeypatch):
    """Without a limit, each step would encode the whole remaining forced text while all other rows wait."""
    text, found = unit * (5_000 // len(unit)), []
    for limit in (backend_module.MAX_FORCED_CHARS, 10**6):
        monkeypatch.setattr(backend_module, "MAX_FORCED_CHARS", limit)
        lengths: list[int] = []

        def read(given: str, lengths: list[int] = lengths) -> list[int]:
            lengths.append(len(given))
            return [NUMBERS[each] for each in LONGEST.findall(unicodedata.normalize("NFC", given).encode())]

        made = LLGuidance(lambda: TOKENS, read, frozenset({END}), [END], len(TOKENS), 1)
        matcher, out = made.compile(GrammarRequest("json_schema", json.dumps({"const": text}))).matcher(), []
        lengths.clear()
        for _ in range(4):
            forced = made.forced(matcher, out[-1] if out else -1)
            mask = matcher.compute_bitmask()
            assert [t for t in range(len(TOKENS)) if mask[t >> 3] >> (t & 7) & 1] == forced[:1]
            assert len(forced) > 64 and made.take(matcher, forced[0], out[-1] if out else -1)
            out.append(forced[0])
        found.append((out, forced[:64]))
        assert max(lengths) <= limit
    assert found[0] == found[1]
