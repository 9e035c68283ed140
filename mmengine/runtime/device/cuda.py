"""An NVIDIA GPU as a Device. No other file uses torch.cuda. Not yet run on a GPU."""

import os
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mmengine.errors import ConfigError
from mmengine.runtime.device.port import CopyStream, Device, Event, Meter, Recorder

GIB = 2**30
WARM_UPS = 2  # runs that let libraries compile kernels and create workspaces before a capture
# Maximum bytes in unfinished copies to the host. Beyond this limit, the computation waits for the oldest
# copy.
MOST_STAGED = 512 * 2**20


class CudaDevice:
    """Implements Device for an NVIDIA GPU."""

    kind = "cuda"
    is_async = has_own_memory = pins_memory = True
    attention: tuple[str, ...] = ("flashinfer", "triton")
    invariant_attention = "triton"
    embedded_dtype = "bfloat16"

    @classmethod
    def is_available(cls) -> bool:
        return torch.cuda.is_available()

    @classmethod
    def count(cls) -> int:
        return torch.cuda.device_count()

    @classmethod
    def problem(cls, index: int | None) -> str | None:
        """See Device. This method initialises CUDA in this process."""
        if torch.version.cuda is None:
            return (
                "this build of torch supports only CPUs; install a CUDA build (see pytorch.org), or use cpu"
            )
        try:
            torch.cuda.init()  # raises an error with the reason, which `is_available` hides
            count = torch.cuda.device_count()
        except (RuntimeError, AssertionError) as error:
            reason = str(error).strip().partition("\n")[0].rstrip(".")[:300]
            return (
                f"torch {torch.__version__} cannot initialise CUDA {torch.version.cuda}: {reason}; "
                "`nvidia-smi` shows the driver's version: update the driver, install a torch for an older "
                "CUDA, or use cpu"
            )
        if not count:
            return "torch sees no GPU; check `nvidia-smi` and CUDA_VISIBLE_DEVICES, or use cpu"
        if (index or 0) >= count:
            seen = "one GPU, cuda:0" if count == 1 else f"GPUs cuda:0 to cuda:{count - 1}"
            return f"torch sees {seen}"
        return None

    @classmethod
    def describe(cls) -> list[str]:
        lines = []
        for index in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(index)
            free, total = torch.cuda.mem_get_info(index)
            lines.append(
                f"{torch.cuda.get_device_name(index)}, compute capability {major}.{minor}, "
                f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
            )
        return lines

    def __init__(self, index: int | None = None) -> None:
        self._index = index
        self.name = self.kind if index is None else f"{self.kind}:{index}"
        self.torch_device = torch.device(self.name)

    def of_rank(self, rank: int, size: int) -> Device:
        """Return the GPU with the number `rank`."""
        if self._index is not None:
            raise ConfigError(
                f"tensor_parallel {size} uses the first {size} GPUs; set device cuda, not {self.name}"
            )
        if torch.cuda.device_count() < size:
            raise ConfigError(
                f"tensor_parallel {size} needs {size} GPUs, but torch sees {torch.cuda.device_count()}; "
                "lower tensor_parallel"
            )
        return CudaDevice(rank)

    def current(self) -> AbstractContextManager[object]:
        """See Device. Does nothing without an index, or if no GPU has this index."""
        if self._index is None or self._index >= torch.cuda.device_count():
            return nullcontext()
        return torch.cuda.device(self._index)

    def set_current(self) -> None:
        torch.cuda.set_device(self.torch_device)

    def answers(self) -> bool:
        """See Device. After most CUDA errors this process cannot use the GPU any more.

        If only the GPU's memory is full, the result is True.
        """
        try:
            return torch.ones(1, device=self.torch_device).item() == 1
        except torch.OutOfMemoryError:
            return True
        except RuntimeError:
            return False

    def compute_capability(self) -> tuple[int, int] | None:
        return torch.cuda.get_device_capability(self.torch_device)

    def num_processors(self) -> int:
        return torch.cuda.get_device_properties(self.torch_device).multi_processor_count

    def event(self, *, timed: bool = False) -> Event:
        return torch.cuda.Event(enable_timing=timed)

    def recorder(self) -> Recorder | None:
        return CudaRecorder(self.torch_device)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def copy_stream(self) -> CopyStream:
        return CudaCopyStream(self.torch_device)

    def memory(self) -> tuple[int, int]:
        return torch.cuda.mem_get_info(self.torch_device)

    def release_unused(self) -> None:
        torch.cuda.empty_cache()

    def meter(self) -> Meter | None:
        return CudaMeter(self.torch_device)

    def process_group(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        """Return an NCCL group, which connects the ranks."""
        self.set_current()
        # With graph registration, ranks exchange buffer addresses during a capture. If one rank's capture
        # failed, the other ranks would wait forever.
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
        options = dist.ProcessGroupNCCL.Options()
        # torch ends the process after this timeout. Rank 0 notices a failure in half the time and can still
        # report the reason (parallel/leader.py).
        options._timeout = 2 * timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)

    def abort_group(self, group: Any) -> None:
        group.abort()


class CudaCopyStream:
    """A CopyStream on a separate CUDA stream. Keeps staged tensors until their copies are complete."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._side = device, torch.cuda.Stream(device)
        self._staged: deque[tuple[torch.cuda.Event, Tensor]] = deque()

    def run(self, copies: Callable[[], None], staged: Tensor) -> None:
        usual = torch.cuda.current_stream(self._device)
        self._side.wait_stream(usual)
        with torch.cuda.stream(self._side):
            copies()
        self._staged.append((self._side.record_event(), staged))
        while sum(each.nbytes for _, each in self._staged) > MOST_STAGED or self._staged[0][0].query():
            # After this wait, later work on the usual stream may reuse the staged tensor's memory.
            usual.wait_event(self._staged.popleft()[0])
            if not self._staged:
                return

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._side)
        self._staged.clear()


class CudaMeter:
    """A Meter that reads statistics from torch's allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def reset(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - self._before


class CudaRecorder:
    """A Recorder that captures CUDA graphs. The graphs share a memory pool and must not run concurrently."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = None  # the memory pool of the first graph, which all graphs share
        self._broken: list[torch.cuda.CUDAGraph] = []

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        usual = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(usual)
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                compute()
        usual.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # With "thread_local", other threads may allocate pinned memory during a capture, for example to
        # prepare images.
        capture = torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        )
        try:
            # A failed capture leaves this thread on the capture stream, so the usual stream is restored.
            with torch.cuda.stream(usual), capture:
                compute()
        except BaseException:
            # torch refuses a failed capture's pool for other captures, so the next capture gets a new pool.
            # The failed graph is kept, because torch's allocator still uses this graph.
            self._broken.append(graph)
            self._pool = None
            raise
        self._pool = self._pool or graph.pool()
        return graph.replay
