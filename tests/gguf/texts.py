"""Generates random texts in many scripts, to compare tokenizers. The texts contain spaces, digits, combining
marks and contractions.
"""

import random
from collections.abc import Iterator

WORDS = (
    "the",
    "of",
    "Hello",
    "don't",
    "I'LL",
    "we've",
    "x+=1;",
    "return",
    "état",
    "naïve",
    "3.14",
    "ΔΣ",
    "日本語",
    "한국어",
)
SPACES = (" ", "  ", "    ", "\t", "\n", "\r\n", "\n\n  ", "\u3000", "\u00a0")
RANGES = (
    (0x20, 0x7F), (0x30, 0x3A), (0xA0, 0x250), (0x300, 0x370), (0x370, 0x600), (0x900, 0xE80),
    (0x2000, 0x2070), (0x3040, 0xA000), (0xAC00, 0xD7A4), (0x1D400, 0x1D800), (0x1F300, 0x1F700),
)  # fmt: skip


def texts(count: int, seed: int) -> Iterator[str]:
    """Yield `count` random texts."""
    rng = random.Random(f"texts {seed}")
    for _ in range(count):
        yield "".join(_piece(rng) for _ in range(rng.randrange(50)))


def _piece(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.2:
        return rng.choice(WORDS) + rng.choice(("", " "))
    if kind < 0.4:
        return rng.choice(SPACES)
    if kind < 0.45:
        return chr(rng.choice((rng.randrange(0xD800), rng.randrange(0xE000, 0x110000))))
    return chr(rng.randrange(*rng.choice(RANGES)))
