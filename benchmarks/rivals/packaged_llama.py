"""Calls llama.cpp's library as the npm package @node-llama-cpp/linux-x64 ships it, with a kernel library for
each kind of CPU. `libraries` names a folder with these files.

Only the leading fields of llama.cpp's structures are named here, because later fields change between
versions.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np

ROOM = 512  # Bytes for fields after the named ones.
FILE_TYPES = {"Q8_0": 7, "Q4_K_M": 15}


class ContextParams(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max")),
        ("rest", ctypes.c_char * ROOM),
    )


class ModelParams(ctypes.Structure):
    _fields_ = (("rest", ctypes.c_char * ROOM),)


class QuantizeParams(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("nthread", "ftype", "output_type", "embedding_type")),
        ("allow_requantize", ctypes.c_bool),
        ("rest", ctypes.c_char * ROOM),
    )


class Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


Log = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


@Log
def _silent(level: int, text: bytes, user_data: int) -> None:
    """Discard llama.cpp's log, which does not belong in a table."""


def load(libraries: Path) -> ctypes.CDLL:
    """Load the library, which selects the kernels for this CPU."""
    ctypes.CDLL(str(libraries / "libggml-base.so"), ctypes.RTLD_GLOBAL)
    (ggml_path,) = libraries.glob("libggml.v*.so")
    (llama_path,) = libraries.glob("libllama.v*.so")
    ggml = ctypes.CDLL(str(ggml_path), ctypes.RTLD_GLOBAL)
    ggml.ggml_backend_load_all_from_path.argtypes = (ctypes.c_char_p,)
    llama = ctypes.CDLL(str(llama_path), ctypes.RTLD_GLOBAL)
    llama.llama_log_set(_silent, None)
    ggml.ggml_backend_load_all_from_path(str(libraries).encode())
    pointer, number, text = ctypes.c_void_p, ctypes.c_int32, ctypes.c_char_p
    declared = {
        "llama_model_default_params": (ModelParams, ()),
        "llama_context_default_params": (ContextParams, ()),
        "llama_model_quantize_default_params": (QuantizeParams, ()),
        "llama_model_load_from_file": (pointer, (text, ModelParams)),
        "llama_init_from_model": (pointer, (pointer, ContextParams)),
        "llama_set_n_threads": (None, (pointer, number, number)),
        "llama_batch_init": (Batch, (number, number, number)),
        "llama_decode": (number, (pointer, Batch)),
        "llama_synchronize": (None, (pointer,)),
        "llama_get_memory": (pointer, (pointer,)),
        "llama_memory_clear": (None, (pointer, ctypes.c_bool)),
        "llama_get_logits": (ctypes.POINTER(ctypes.c_float), (pointer,)),
        "llama_model_get_vocab": (pointer, (pointer,)),
        "llama_vocab_n_tokens": (number, (pointer,)),
        "llama_model_size": (ctypes.c_uint64, (pointer,)),
        "llama_model_quantize": (ctypes.c_uint32, (text, text, ctypes.POINTER(QuantizeParams))),
        "llama_print_system_info": (text, ()),
    }
    for name, (result, arguments) in declared.items():
        function = getattr(llama, name)
        function.restype, function.argtypes = result, arguments
    llama.llama_backend_init()
    return llama


def quantise(libraries: Path, source: Path, out: Path, kind: str) -> None:
    """Quantise a GGUF file again with llama.cpp's quantiser. `kind`: a key of FILE_TYPES."""
    llama = load(libraries)
    params = llama.llama_model_quantize_default_params()
    params.nthread, params.ftype, params.allow_requantize = 1, FILE_TYPES[kind], True
    if llama.llama_model_quantize(str(source).encode(), str(out).encode(), ctypes.byref(params)):
        raise RuntimeError(f"llama.cpp did not quantise {source} to {kind}")


class PackagedLlama:
    """A Side (benchmarks/rivals/side.py): llama.cpp with its own defaults, except for threads and sizes."""

    def __init__(self, libraries: Path, file: Path, threads: int, rows: int, tokens: int) -> None:
        self._llama = llama = load(libraries)
        self._model = llama.llama_model_load_from_file(str(file).encode(), llama.llama_model_default_params())
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.n_batch = rows * tokens, rows, tokens
        self._context = llama.llama_init_from_model(self._model, params)
        if not self._model or not self._context:
            raise RuntimeError(f"llama.cpp cannot load {file}")
        llama.llama_set_n_threads(self._context, threads, threads)
        self._most = tokens
        self._batch = llama.llama_batch_init(tokens, 0, 1)
        self._num_tokens = 0  # Number of tokens in each row.
        self._vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self.weight_bytes = llama.llama_model_size(self._model)
        self.about = llama.llama_print_system_info().decode()

    def prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        self._clear()
        length = len(prompts[0])
        items = [(row, at, prompt[at]) for row, prompt in enumerate(prompts) for at in range(length)]
        for first in range(0, len(items), self._most):
            part = items[first : first + self._most]
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
        for place, ((row, at, token), asked) in enumerate(zip(items, wanted, strict=True)):
            batch.token[place], batch.pos[place], batch.logits[place] = token, at, asked
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, row
        if (failed := self._llama.llama_decode(self._context, batch)) != 0:
            raise RuntimeError(f"llama_decode gave {failed}")
        self._llama.llama_synchronize(self._context)
