"""Seeded requests from hostile clients: messages with hostile media, and hostile texts."""

import base64
import random
from collections.abc import Callable
from typing import Any

from tests.serve.hostile_media import BOMBS, IMAGES, VIDEOS, hostile_file

SPECIAL = (
    "<|im_start|>",
    "<|im_end|>",
    "<|image_pad|>",
    "<|vision_start|>",
    "<|endoftext|>",
    "<|video_pad|>",
)
ODD = "\u200d\u202e\u0301\ufeff\U0001f468\u200d\U0001f469\U000e0041\u0000\uffff\u1160\u2028"


def _huge(rng: random.Random) -> str:
    return rng.choice(("a", "word ", "0123456789", "\n", "\u4e2d")) * rng.choice((10**4, 10**5, 10**6))


def _surrogates(rng: random.Random) -> str:
    return "".join(chr(rng.randrange(0xD800, 0xE000)) if rng.random() < 0.3 else "x" for _ in range(50))


def _special(rng: random.Random) -> str:
    return " ".join(rng.choice(SPECIAL) for _ in range(rng.choice((1, 10, 1000))))


def _odd(rng: random.Random) -> str:
    return "".join(rng.choice(ODD) for _ in range(rng.choice((1, 100, 5000))))


def _random(rng: random.Random) -> str:
    points = (rng.randrange(1, 0x110000) for _ in range(rng.choice((10, 1000))))
    return "".join(map(chr, points))


TEXTS: dict[str, Callable[[random.Random], str]] = {
    "huge": _huge,
    "surrogates": _surrogates,
    "special tokens": _special,
    "odd unicode": _odd,
    "random code points": _random,
    "empty": lambda rng: "",
    "combining marks": lambda rng: "e" + "\u0301" * rng.choice((10, 10**4, 10**5)),
}


def _nested(rng: random.Random) -> Any:
    value: Any = 1
    for _ in range(rng.choice((5, 500))):
        value = {"a": [value]}
    return value


def _misshapen(rng: random.Random) -> list[dict[str, Any]]:
    """Return invalid messages."""
    return rng.choice(
        (
            [{}],
            [{"role": "user"}],
            [{"role": 5, "content": "x"}],
            [{"role": "user", "content": 5}],
            [{"role": "user", "content": [{"type": "text"}] * 5000}],
            [{"role": "user", "content": [{"type": "image"}]}],
            [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "http://example.com/a.png"}}],
                }
            ],
            [{"role": "user", "content": [{"type": "image", "image": "/etc/passwd"}]}],
            [{"role": "user", "content": [{"type": "image", "image": "data:image/png;base64,%%%"}]}],
            [{"role": "assistant", "tool_calls": _nested(rng)}],
            [{"role": "user", "content": "x"}] * 5000,
            [{"role": "user", "content": [{"type": "video", "video": []}]}],
        )
    )


def _media(kind: str, data: bytes, rng: random.Random) -> dict[str, Any]:
    part: dict[str, Any] = {"type": kind}
    if rng.random() < 0.5:
        part[kind] = data
    else:
        part[f"{kind}_url"] = {"url": f"data:{kind}/x;base64,{base64.b64encode(data).decode()}"}
    if rng.random() < 0.2:
        part[
            rng.choice(("min_pixels", "max_pixels", "fps", "num_frames", "resized_height", "video_start"))
        ] = rng.choice((0, -1, 1, 10**9, 2**70, 1e308, float("nan"), "x", [1], True))
    return part


def hostile_request(rng: random.Random) -> tuple[str, list[dict[str, Any]]]:
    """Return the request's kind and messages."""
    dice = rng.random()
    if dice < 0.25:
        kind = rng.choice(list(TEXTS))
        return f"text: {kind}", [{"role": "user", "content": TEXTS[kind](rng)}]
    if dice < 0.3:
        return "messages", _misshapen(rng)
    if dice < 0.31:
        kind, data = hostile_file(rng, BOMBS)
        parts = [_media("image", data, rng)]
    elif dice < 0.75:
        kind, data = hostile_file(rng, IMAGES)
        parts = [_media("image", data, rng)] * rng.choice((1, 1, 1, 3))
    elif dice < 0.95:
        kind, data = hostile_file(rng, VIDEOS)
        parts = [_media("video", data, rng)]
    else:
        kind = "frames"
        frames = [hostile_file(rng, IMAGES)[1] for _ in range(rng.choice((1, 3, 20)))]
        parts = [{"type": "video", "video": frames}]
    return kind, [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}]
