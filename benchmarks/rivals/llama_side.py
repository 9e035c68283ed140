"""Runs llama.cpp for the comparison: python llama_side.py GGUF_FILE THREADS.

A single call of llama_decode computes all rows of a step.
"""

import ctypes
import sys
from collections.abc import Sequence

import llama_cpp.llama_cpp as llama
import numpy as np
from side import MAX_ROWS, MAX_TOKENS, serve


class Llama:
    """llama.cpp with its own defaults, except for threads and sizes."""

    def __init__(self, path: str, threads: int) -> None:
        llama.llama_backend_init()
        self._model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_seq_max = MAX_ROWS * MAX_TOKENS, MAX_ROWS
        params.n_batch = MAX_TOKENS
        params.n_threads = params.n_threads_batch = threads
        self._context = llama.llama_init_from_model(self._model, params)
        self._batch = llama.llama_batch_init(MAX_TOKENS, 0, 1)
        self._num_tokens = 0  # Number of tokens in each row.
        self._vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self.weight_bytes = llama.llama_model_size(self._model)

    def prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
        length = len(prompts[0])
        items = [(row, at, prompt[at]) for row, prompt in enumerate(prompts) for at in range(length)]
        for first in range(0, len(items), MAX_TOKENS):
            part = items[first : first + MAX_TOKENS]
            self._decode(part, [at == length - 1 for _, at, _ in part])
        self._num_tokens = length

    def step(self, tokens: Sequence[int]) -> None:
        items = [(row, self._num_tokens, token) for row, token in enumerate(tokens)]
        self._decode(items, [True] * len(items))
        self._num_tokens += 1

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
        self._decode([(0, at, token) for at, token in enumerate(tokens)], [True] * len(tokens))
        found = llama.llama_get_logits(self._context)
        return np.ctypeslib.as_array(found, (len(tokens), self._vocab_size)).copy()

    def _decode(self, items: Sequence[tuple[int, int, int]], wanted: Sequence[bool]) -> None:
        """Compute the items (row, position, token). `wanted`: for each item, whether its logits are
        needed.
        """
        batch = self._batch
        batch.n_tokens = len(items)
        for place, ((row, at, token), asked) in enumerate(zip(items, wanted, strict=True)):
            batch.token[place], batch.pos[place], batch.logits[place] = token, at, asked
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, row
        if (failed := llama.llama_decode(self._context, batch)) != 0:
            raise RuntimeError(f"llama_decode gave {failed}")
        llama.llama_synchronize(self._context)


@llama.llama_log_callback
def _silent(level: int, text: bytes, user_data: ctypes.c_void_p) -> None:
    """Discard llama.cpp's log, which does not belong in the table."""


if __name__ == "__main__":
    llama.llama_log_set(_silent, ctypes.c_void_p(0))
    serve(Llama(sys.argv[1], int(sys.argv[2])))
