"""A process with one engine. It reads requests from stdin, one JSON line each, and writes times to stdout.

Other output of a side goes to stderr.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

MAX_ROWS, MAX_TOKENS = 16, 640  # rows in a batch; tokens in a row, prompt and answer


class Side(Protocol):
    """An engine to measure. The clock covers `prompts` and `step` only."""

    weight_bytes: int  # bytes of the model in memory, head and embedding included

    def prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        """Drop the previous rows and compute these prompts, all of one length."""

    def step(self, tokens: Sequence[int]) -> None:
        """Compute one more token for each row. An engine that samples uses its own tokens instead."""

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Return float32 [n, vocabulary] for one text: the prediction after each of its tokens."""


def serve(side: Side) -> None:
    """Answer requests until stdin ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps({"weight_bytes": side.weight_bytes}), file=out, flush=True)
    for line in sys.stdin:
        ask = json.loads(line)
        print(json.dumps(_told(side, ask)), file=out, flush=True)


def _told(side: Side, ask: dict) -> dict:
    if "logits" in ask:
        np.save(ask["logits"], side.logits(ask["tokens"]))
        return {}
    begun = time.perf_counter()
    side.prompts(ask["prompts"])
    prompt, steps = time.perf_counter() - begun, []
    for tokens in ask["tokens"]:
        begun = time.perf_counter()
        side.step(tokens)
        steps.append(time.perf_counter() - begun)
    return {"prompt": prompt, "steps": steps, "rss": _resident_bytes()}


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
