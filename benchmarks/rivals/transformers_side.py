"""Runs transformers for rivals_cpu.py: python transformers_side.py FOLDER THREADS DTYPE.

The model uses SDPA and a static KV cache, which is faster than a growing cache.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from side import MAX_TOKENS, serve
from transformers import AutoModelForCausalLM, StaticCache
from transformers.utils import logging


class Transformers:
    def __init__(self, folder: Path, threads: int, dtype: torch.dtype) -> None:
        torch.set_num_threads(threads)
        logging.disable_progress_bar()
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self._caches: dict[int, StaticCache] = {}  # Keyed by the number of rows.
        self._cache: StaticCache | None = None
        self.weight_bytes = sum(value.nbytes for value in self._model.parameters())

    def prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        rows = len(prompts)
        if rows not in self._caches:
            self._caches[rows] = StaticCache(self._model.config, max_cache_len=MAX_TOKENS)
        self._cache = self._caches[rows]
        with torch.inference_mode():  # The cache's tensors were created in this mode.
            self._cache.reset()
        self._forward(torch.tensor(prompts))

    def step(self, tokens: Sequence[int]) -> None:
        self._forward(torch.tensor(tokens)[:, None])

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        with torch.inference_mode():
            return self._model(torch.tensor([tokens]), use_cache=False).logits[0].float().numpy()

    def _forward(self, ids: torch.Tensor) -> None:
        with torch.inference_mode():
            self._model(ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)


if __name__ == "__main__":
    folder, threads, dtype = sys.argv[1:]
    serve(Transformers(Path(folder), int(threads), getattr(torch, dtype)))
