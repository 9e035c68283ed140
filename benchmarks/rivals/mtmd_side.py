"""Runs llama.cpp for images_cpu.py: python mtmd_side.py MODEL PROJECTOR THREADS LIBRARIES.

LIBRARIES is the folder with libmtmd. As in llama.cpp's server, mtmd_tokenize divides the prompt into chunks
of text and pictures, which are computed one after another. A picture first passes the vision tower.
"""

import ctypes
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from image_side import AFTER, BEFORE, MAX_TOKENS, Answer, serve_images
from mtmd_library import InputText, load_mtmd
from packaged_llama import load

TEXT = 0  # The value of MTMD_INPUT_CHUNK_TYPE_TEXT.


class Mtmd:
    """An ImageSide (image_side.py): llama.cpp with its default settings, except for threads and sizes."""

    def __init__(self, model: str, projector: str, threads: int, libraries: Path) -> None:
        self._llama, self._mtmd = llama, mtmd = load(libraries), load_mtmd(libraries)
        self._model = llama.llama_model_load_from_file(model.encode(), llama.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        params = llama.llama_context_default_params()
        params.n_ctx = self._batch = MAX_TOKENS
        self._context = llama.llama_init_from_model(self._model, params)
        llama.llama_set_n_threads(self._context, threads, threads)
        self._memory = llama.llama_get_memory(self._context)
        media = mtmd.mtmd_context_params_default()
        media.use_gpu, media.n_threads = False, threads
        self._media = mtmd.mtmd_init_from_file(projector.encode(), self._model, media)
        if not self._media:
            raise RuntimeError(f"llama.cpp cannot load {projector}")
        self._vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self._width = llama.llama_model_n_embd_inp(self._model)
        self._kept = 0, 0  # Numbers of chunks and positions in the KV cache, up to the picture's end.
        self._num_features = 0

    def ask(self, picture: np.ndarray, question: str, keeps: bool) -> Answer:
        start = time.perf_counter()
        with self._chunks(picture, question) as chunks:
            prepared = time.perf_counter() - start
            done, position = self._kept if keeps else (0, 0)
            self._llama.llama_memory_seq_rm(self._memory, 0, position, -1)
            for place in range(done, len(chunks)):
                position = self._evaluate(chunks[place], position, place == len(chunks) - 1)
                if not self._is_text(chunks[place]):
                    self._kept = place + 1, position
            self._llama.llama_synchronize(self._context)
            first = int(self.logits().argmax())
            text_ids = [token for chunk in chunks for token in self._text_ids(chunk)]
            sizes = [self._mtmd.mtmd_input_chunk_get_n_tokens(chunk) for chunk in chunks]
            return Answer(first, text_ids, sum(sizes) - len(text_ids), sum(sizes[:done]), prepared)

    def features(self) -> np.ndarray:
        found = self._mtmd.mtmd_get_output_embd(self._media)
        return np.ctypeslib.as_array(found, (self._num_features, self._width)).copy()

    def logits(self) -> np.ndarray:
        found = self._llama.llama_get_logits(self._context)
        return np.ctypeslib.as_array(found, (self._vocab_size,))

    @contextmanager
    def _chunks(self, picture: np.ndarray, question: str) -> Iterator[list[int]]:
        """Yield the prompt's chunks: text, the picture, text."""
        mtmd = self._mtmd
        pixels = np.ascontiguousarray(picture)
        bitmap = ctypes.c_void_p(mtmd.mtmd_bitmap_init(pixels.shape[1], pixels.shape[0], pixels.ctypes.data))
        text = BEFORE.encode() + mtmd.mtmd_default_marker() + AFTER.format(question).encode()
        chunks = mtmd.mtmd_input_chunks_init()
        try:
            given = InputText(text, len(text), False, True)
            if mtmd.mtmd_tokenize(self._media, chunks, ctypes.byref(given), ctypes.byref(bitmap), 1):
                raise RuntimeError("mtmd_tokenize failed")
            yield [
                mtmd.mtmd_input_chunks_get(chunks, place)
                for place in range(mtmd.mtmd_input_chunks_size(chunks))
            ]
        finally:
            mtmd.mtmd_input_chunks_free(chunks)
            mtmd.mtmd_bitmap_free(bitmap)

    def _evaluate(self, chunk: int, position: int, is_last: bool) -> int:
        """Run the model on a chunk of text or a picture, and return the next position."""
        reached = ctypes.c_int32(position)
        failed = self._mtmd.mtmd_helper_eval_chunk_single(
            self._media, self._context, chunk, position, 0, self._batch, is_last, ctypes.byref(reached)
        )
        if failed:
            raise RuntimeError(f"mtmd_helper_eval_chunk_single gave {failed}")
        if not self._is_text(chunk):
            self._num_features = self._mtmd.mtmd_input_chunk_get_n_tokens(chunk)
        return reached.value

    def _is_text(self, chunk: int) -> bool:
        return self._mtmd.mtmd_input_chunk_get_type(chunk) == TEXT

    def _text_ids(self, chunk: int) -> list[int]:
        count = ctypes.c_size_t()
        if not self._is_text(chunk):
            return []
        tokens = self._mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(count))
        return tokens[: count.value]


if __name__ == "__main__":
    model, projector, threads, libraries = sys.argv[1:]
    serve_images(Mtmd(model, projector, int(threads), Path(libraries)))
