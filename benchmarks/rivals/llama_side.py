"""Runs llama.cpp for rivals_cpu.py and gguf_cpu.py: python llama_side.py GGUF_FILE THREADS [LIBRARIES].

LIBRARIES is the folder of llama.cpp's npm package (packaged_llama.py). The default is the library that
environment.sh compiles for the package llama_cpp. A single call of llama_decode computes all rows of a step.
"""

import ctypes
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
from packaged_llama import load, silent
from side import MAX_ROWS, MAX_TOKENS, serve


class Llama:
    """Implements Side (side.py) with llama.cpp. All settings except threads and sizes have their default
    values. `llama`: the module llama_cpp or the loaded library.
    """

    def __init__(self, llama: ModuleType | ctypes.CDLL, file: str, threads: int) -> None:
        self._llama = llama
        self._model = llama.llama_model_load_from_file(file.encode(), llama.llama_model_default_params())
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.n_batch = MAX_ROWS * MAX_TOKENS, MAX_ROWS, MAX_TOKENS
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {file}")
        self._context = llama.llama_init_from_model(self._model, params)
        llama.llama_set_n_threads(self._context, threads, threads)
        self._batch = llama.llama_batch_init(MAX_TOKENS, 0, 1)
        self._num_tokens = 0  # Number of tokens in each row.
        self._vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self.weight_bytes = llama.llama_model_size(self._model)

    def prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        self._clear()
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
        self._clear()
        self._decode([(0, at, token) for at, token in enumerate(tokens)], [True] * len(tokens))
        found = self._llama.llama_get_logits(self._context)
        return np.ctypeslib.as_array(found, (len(tokens), self._vocab_size)).copy()

    def _clear(self) -> None:
        self._llama.llama_memory_clear(self._llama.llama_get_memory(self._context), True)

    def _decode(self, items: Sequence[tuple[int, int, int]], wanted: Sequence[bool]) -> None:
        """Compute the items (row, position, token). `wanted`: whether each item's logits are needed."""
        batch = self._batch
        batch.n_tokens = len(items)
        for place, ((row, at, token), is_wanted) in enumerate(zip(items, wanted, strict=True)):
            batch.token[place], batch.pos[place], batch.logits[place] = token, at, is_wanted
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, row
        if (failed := self._llama.llama_decode(self._context, batch)) != 0:
            raise RuntimeError(f"llama_decode gave {failed}")
        self._llama.llama_synchronize(self._context)


def _of_package() -> ModuleType:
    """Return the module llama_cpp, which environment.sh installs."""
    from llama_cpp import llama_cpp

    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    return llama_cpp


if __name__ == "__main__":
    file, threads, *libraries = sys.argv[1:]
    serve(Llama(load(Path(libraries[0])) if libraries else _of_package(), file, int(threads)))
