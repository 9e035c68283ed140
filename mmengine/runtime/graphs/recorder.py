"""Records what a function launches on a GPU, to launch it again at once. Not yet run on a GPU."""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from mmengine.config import EngineConfig

WARM_UPS = 2  # libraries make their handles and workspaces, and compile, outside of what is captured


class Recorder(Protocol):
    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        """What does again what `compute` does, over the tensors that it used. It may be called several times
        meanwhile, and raises what goes wrong."""


def recorder_for(config: EngineConfig, device: torch.device) -> Recorder | None:
    """What captures on `device` as `config` has it; None: nothing does."""
    return CudaRecorder(device) if device.type == "cuda" and config.cuda_graphs else None


class CudaRecorder:
    """CUDA graphs that share one pool of memory: one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = None  # of the first graph, and then of all
        self._broken: list[torch.cuda.CUDAGraph] = []

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        usual = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(usual)
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                compute()
        usual.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Threads that prepare images may ask for pinned memory meanwhile, which only concerns them.
        capture = torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        )
        try:
            # A capture that fails leaves this thread on its stream, so the usual one is taken up again here.
            with torch.cuda.stream(usual), capture:
                compute()
        except BaseException:
            # To torch's allocator it goes on: it asks the graph whose memory is wanted, and refuses the pool
            # to other captures.
            self._broken.append(graph)
            self._pool = None
            raise
        self._pool = self._pool or graph.pool()
        return graph.replay
