"""One engine in a process of its own, told on stdin what to compute, a line of JSON each; on stdout how long
it took. What a side prints beside that goes to stderr."""

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

MAX_ROWS, MAX_TOKENS = 16, 640  # of a batch; of a row, prompt and answer


class Side(Protocol):
    """Clocks go over what `prompts` and `step` do, and over nothing else."""

    weight_bytes: int  # that it holds of the model, head and embedding included

    def prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        """Forget what was before, and compute these, all of one length."""

    def step(self, tokens: Sequence[int]) -> None:
        """One more token of each row. An engine that samples goes on with its own instead."""

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """float32 [n, vocabulary] of one text, what comes after each of its tokens."""


def serve(side: Side) -> None:
    """Until stdin ends."""
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
