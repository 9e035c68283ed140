"""Runs OpenVINO for rivals_cpu.py: python openvino_side.py FOLDER THREADS.

optimum-intel exports the model with the KV cache as internal state.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import openvino
from side import serve


class OpenVINO:
    """A model compiled for lowest latency, in the precision that OpenVINO chooses for this CPU."""

    def __init__(self, folder: Path, threads: int) -> None:
        path = folder / "openvino_model.xml"
        how = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1}
        self._request = openvino.Core().compile_model(path, "CPU", how).create_infer_request()
        self._num_tokens = 0  # Number of tokens in each row.
        self.weight_bytes = (folder / "openvino_model.bin").stat().st_size

    def prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        self._request.reset_state()
        self._num_tokens = 0
        self._infer(np.array(prompts))

    def step(self, tokens: Sequence[int]) -> None:
        self._infer(np.array(tokens)[:, None])

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        self.prompts([tokens])
        return self._request.get_tensor("logits").data[0].astype(np.float32)

    def _infer(self, ids: np.ndarray) -> None:
        rows, new = ids.shape
        before, self._num_tokens = self._num_tokens, self._num_tokens + new
        positions = np.arange(before, self._num_tokens, dtype=np.int64)
        self._request.infer(
            {
                "input_ids": ids.astype(np.int64),
                "attention_mask": np.ones((rows, self._num_tokens), np.int64),
                "position_ids": np.tile(positions, (rows, 1)),
                "beam_idx": np.arange(rows, dtype=np.int32),
            },
            share_inputs=True,
        )


if __name__ == "__main__":
    serve(OpenVINO(Path(sys.argv[1]), int(sys.argv[2])))
