"""Runs an engine that answers questions about pictures: reads requests as JSON lines from stdin, and writes
times and token counts to stdout.
"""

from dataclasses import asdict, dataclass
from typing import Protocol

import numpy as np
from side import Clock, answer_lines, resident_bytes

MAX_TOKENS = 2048  # Maximum number of prompt tokens, including the picture's tokens.
BEFORE, AFTER = "<|im_start|>user\n", "{}<|im_end|>\n<|im_start|>assistant\n"


@dataclass(frozen=True, slots=True)
class Answer:
    """The first token of an answer, and figures about its prompt.

    `text_ids`: the prompt's ids without the picture's tokens. `num_kept_tokens`: number of prompt tokens that
    were already in the KV cache. `prepared`: seconds for resizing the picture and tokenising the text.
    """

    first_token: int
    text_ids: list[int]
    num_image_tokens: int
    num_kept_tokens: int
    prepared: float


class ImageSide(Protocol):
    """An engine to measure. Only `ask` is timed."""

    def ask(self, picture: np.ndarray, question: str, keeps: bool) -> Answer:
        """Compute the answer's first token. `picture`: uint8 [height, width, 3]. `keeps`: whether to reuse
        the last call's picture in the KV cache.
        """

    def features(self) -> np.ndarray:
        """Return the vision tower's output for the last encoded picture, float32 [tokens, width]."""

    def logits(self) -> np.ndarray:
        """Return the logits of the last answer's first token, float32 [vocabulary]."""


def serve_images(side: ImageSide) -> None:
    """Answer requests until stdin ends."""

    def told(ask: dict) -> dict:
        if "output" in ask:
            np.save(ask["path"], side.features() if ask["output"] == "features" else side.logits())
            return {}
        picture = np.load(ask["picture"])
        clock = Clock()
        answer = side.ask(picture, ask["question"], ask["keeps"])
        seconds, cpu_seconds = clock.read()
        return asdict(answer) | {"seconds": seconds, "cpu": cpu_seconds, "rss": resident_bytes()}

    answer_lines({}, told)
