"""Runs an engine to measure: reads requests as JSON lines from stdin, and writes the times to stdout. All
other output goes to stderr.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

MAX_ROWS, MAX_TOKENS = 16, 640  # Maximum rows in a batch; maximum tokens in a row.


class Side(Protocol):
    """An engine to measure. Only `prompts` and `step` are timed."""

    weight_bytes: int  # Bytes of the weights in memory, including head and embedding.

    def prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        """Drop the previous rows and compute prompts of equal length."""

    def step(self, tokens: Sequence[int]) -> None:
        """Compute the next token of each row. `tokens`: the rows' last tokens. mmengine ignores `tokens` and
        uses its sampled tokens.
        """

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Return the logits after each token, float32 [n, vocabulary]."""


def serve(side: Side) -> None:
    """Answer requests until stdin ends."""
    answer_lines({"weight_bytes": side.weight_bytes}, lambda ask: _told(side, ask))


def answer_lines(greeting: Mapping[str, object], answer: Callable[[dict], dict]) -> None:
    """Write the greeting, then an answer to each line of stdin."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps(greeting), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=out, flush=True)


def _told(side: Side, ask: dict) -> dict:
    if "logits" in ask:
        np.save(ask["logits"], side.logits(ask["tokens"]))
        return {}
    clock = Clock()
    side.prompts(ask["prompts"])
    prompt, steps = clock.read(), []
    for tokens in ask["tokens"]:
        side.step(tokens)
        steps.append(clock.read())
    return {
        "prompt": prompt[0],
        "prompt_cpu": prompt[1],
        "steps": [step[0] for step in steps],
        "steps_cpu": [step[1] for step in steps],
        "rss": resident_bytes(),
    }


class Clock:
    """Measures elapsed seconds and CPU seconds since the last `read`."""

    def __init__(self) -> None:
        self._last = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float]:
        before, self._last = self._last, (time.perf_counter(), time.process_time())
        return self._last[0] - before[0], self._last[1] - before[1]


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
