"""Calls llama.cpp's libraries. `libraries` is the folder with the .so files, from the npm package
@node-llama-cpp/linux-x64 or from environment.sh's build.

The classes declare only the first fields of llama.cpp's structures, because later fields change between
versions.
"""

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOM = 512  # Bytes for the fields that a class does not declare.
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
def silent(level: int, text: bytes, user_data: int) -> None:
    """Discard llama.cpp's log."""


def load(libraries: Path) -> ctypes.CDLL:
    """Load llama.cpp. The npm package's kernels for this CPU are loaded too, if present."""
    ctypes.CDLL(str(libraries / "libggml-base.so"), ctypes.RTLD_GLOBAL)
    ggml = ctypes.CDLL(_library(libraries, "libggml"), ctypes.RTLD_GLOBAL)
    llama = ctypes.CDLL(_library(libraries, "libllama"), ctypes.RTLD_GLOBAL)
    llama.llama_log_set(silent, None)
    if any(libraries.glob("libggml-cpu-*.so")):
        ggml.ggml_backend_load_all_from_path.argtypes = (ctypes.c_char_p,)
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
        "llama_memory_seq_rm": (ctypes.c_bool, (pointer, number, number, number)),
        "llama_get_logits": (ctypes.POINTER(ctypes.c_float), (pointer,)),
        "llama_model_get_vocab": (pointer, (pointer,)),
        "llama_vocab_n_tokens": (number, (pointer,)),
        "llama_model_n_embd_inp": (number, (pointer,)),
        "llama_model_size": (ctypes.c_uint64, (pointer,)),
        "llama_model_quantize": (ctypes.c_uint32, (text, text, ctypes.POINTER(QuantizeParams))),
    }
    declare(llama, declared)
    llama.llama_backend_init()
    return llama


def _library(libraries: Path, name: str) -> str:
    """Return the path of a library. The npm package's file names contain a version."""
    return str(next(libraries.glob(f"{name}.v*.so"), libraries / f"{name}.so"))


def declare(library: ctypes.CDLL, functions: Mapping[str, tuple[Any, Sequence[Any]]]) -> None:
    """Set the result type and argument types of each function."""
    for name, (result, arguments) in functions.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments


def quantise(libraries: Path, source: Path, out: Path, kind: str) -> None:
    """Quantise a GGUF file with llama.cpp's quantiser. `kind`: a key of FILE_TYPES."""
    llama = load(libraries)
    params = llama.llama_model_quantize_default_params()
    params.nthread, params.ftype, params.allow_requantize = 1, FILE_TYPES[kind], True
    if llama.llama_model_quantize(str(source).encode(), str(out).encode(), ctypes.byref(params)):
        raise RuntimeError(f"llama.cpp did not quantise {source} to {kind}")
