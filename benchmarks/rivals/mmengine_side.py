"""Runs mmengine for rivals_cpu.py and gguf_cpu.py: python mmengine_side.py FOLDER THREADS QUANTIZE
ACTIVATIONS [DTYPE].

The measured time covers whole engine steps, including the scheduler, its events, and sampling.
"""

import gc
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from side import MAX_ROWS, MAX_TOKENS, serve

from mmengine import Engine, EngineConfig
from mmengine.native.linear import PackedLinear
from mmengine.request import SamplingParams
from mmengine.serve.prompt.prompt import Prompt

MAX_NEW = 64  # Maximum number of tokens in an answer.


class MMEngine:
    def __init__(
        self, folder: str, threads: int, quantize: str, activations: str, dtype: str = "bfloat16"
    ) -> None:
        config = EngineConfig(
            spec="none",
            max_model_len=MAX_TOKENS,
            max_num_seqs=MAX_ROWS,
            num_blocks=MAX_ROWS * MAX_TOKENS // 16,
            enable_prefix_caching=False,
            num_threads=threads,
            quantize=quantize,
            activations=activations,
        )
        self._engine = Engine(Path(folder), device="cpu", dtype=dtype, config=config)
        self._ids: list[str] = []
        self.weight_bytes = _held_bytes()

    def prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        for request in self._ids:
            self._engine.cancel(request)
        while self._engine.has_work:
            self._engine.step()
        self._ids = [
            self._engine.submit(Prompt(token_ids=list(prompt)), max_tokens=MAX_NEW, ignore_eos=True)
            for prompt in prompts
        ]
        while self._step() < len(prompts):
            pass

    def step(self, tokens: Sequence[int]) -> None:
        if self._step() != len(tokens):
            raise RuntimeError("a step left a row out")

    def _step(self) -> int:
        """Run a step and return how many rows got a token."""
        return sum(len(output.token_ids) for output in self._engine.step())

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Return the logits after each token of a text. A request for prompt logprobs computes them."""
        model = self._engine.built.executor._runner._model
        found, whole = [], model.logits

        def noted(hidden: torch.Tensor) -> torch.Tensor:
            found.append(whole(hidden))
            return found[-1]

        model.logits = noted
        try:
            sampling = SamplingParams(max_tokens=1, prompt_logprobs=1, ignore_eos=True)
            self._engine.submit(Prompt(token_ids=list(tokens)), sampling)
            while self._engine.has_work:
                self._engine.step()
        finally:
            del model.logits
        last, *before = found  # The logits of the sampled token are computed first.
        return torch.cat([*before, last]).float().numpy()


def _held_bytes() -> int:
    """Return the size of all packed matrices in bytes. The norms (0.1 % of the weights) are not included."""
    return sum(each._packed.nbytes for each in gc.get_objects() if type(each) is PackedLinear)


if __name__ == "__main__":
    folder, threads, *how = sys.argv[1:]
    serve(MMEngine(folder, int(threads), *how))
