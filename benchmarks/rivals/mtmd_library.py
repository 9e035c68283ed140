"""Loads libmtmd, llama.cpp's library for pictures. environment.sh compiles the library."""

import ctypes
from pathlib import Path

from packaged_llama import ROOM, declare, silent


class MtmdParams(ctypes.Structure):
    """The leading fields of mtmd_context_params."""

    _fields_ = (
        ("use_gpu", ctypes.c_bool),
        ("device", ctypes.c_void_p),
        ("print_timings", ctypes.c_bool),
        ("n_threads", ctypes.c_int),
        ("rest", ctypes.c_char * ROOM),
    )


class InputText(ctypes.Structure):
    _fields_ = (
        ("text", ctypes.c_char_p),
        ("text_len", ctypes.c_size_t),
        ("add_special", ctypes.c_bool),
        ("parse_special", ctypes.c_bool),
    )


def load_mtmd(libraries: Path) -> ctypes.CDLL:
    """Load libmtmd. Call packaged_llama.load with the same folder first."""
    mtmd = ctypes.CDLL(str(libraries / "libmtmd.so"))
    pointer, number, text, size = ctypes.c_void_p, ctypes.c_int32, ctypes.c_char_p, ctypes.c_size_t
    chunk = (pointer, pointer, pointer, number, number, number, ctypes.c_bool, ctypes.POINTER(number))
    functions = {
        "mtmd_default_marker": (text, ()),
        "mtmd_context_params_default": (MtmdParams, ()),
        "mtmd_init_from_file": (pointer, (text, pointer, MtmdParams)),
        "mtmd_bitmap_init": (pointer, (ctypes.c_uint32, ctypes.c_uint32, pointer)),
        "mtmd_bitmap_free": (None, (pointer,)),
        "mtmd_input_chunks_init": (pointer, ()),
        "mtmd_input_chunks_size": (size, (pointer,)),
        "mtmd_input_chunks_get": (pointer, (pointer, size)),
        "mtmd_input_chunks_free": (None, (pointer,)),
        "mtmd_input_chunk_get_type": (number, (pointer,)),
        "mtmd_input_chunk_get_n_tokens": (size, (pointer,)),
        "mtmd_input_chunk_get_tokens_text": (ctypes.POINTER(number), (pointer, ctypes.POINTER(size))),
        "mtmd_tokenize": (
            number,
            (pointer, pointer, ctypes.POINTER(InputText), ctypes.POINTER(pointer), size),
        ),
        "mtmd_helper_eval_chunk_single": (number, chunk),
        "mtmd_get_output_embd": (ctypes.POINTER(ctypes.c_float), (pointer,)),
        "mtmd_helper_log_set": (None, (pointer, pointer)),
    }
    declare(mtmd, functions)
    mtmd.mtmd_helper_log_set(silent, None)
    return mtmd
