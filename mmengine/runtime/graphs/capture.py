"""Captures CUDA graphs of the same work in several sizes. If one size fails, no size is captured."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

import structlog

from mmengine.config import EngineConfig
from mmengine.errors import in_one_line
from mmengine.runtime.attention.base import AttentionBackend, Bucket
from mmengine.runtime.device.port import Device, Recorder
from mmengine.runtime.graphs.buckets import empty_step

REPLAYED, CAPTURE_FAILED = "replayed", "capture_failed"  # label values in metrics

Size = TypeVar("Size")
Replays = dict[Bucket, Callable[[], None]]
# The type of the function `capture`. A sharded model has a function that captures on all ranks together.
Capture = Callable[
    [str, Iterable[Bucket], Callable[[Bucket], object], Callable[[Bucket], None], Recorder], Replays
]
log = structlog.get_logger("mmengine.operators")


def recorder_for(config: EngineConfig, device: Device) -> Recorder | None:
    """Return a recorder for `device`, or None if the device or `config` does not allow captures."""
    return device.recorder() if config.cuda_graphs else None


def capture(
    what: str,
    sizes: Iterable[Size],
    prepare: Callable[[Size], object],
    compute: Callable[[Size], None],
    recorder: Recorder,
) -> dict[Size, Callable[[], None]]:
    """Capture what `compute` launches for each size. Returns size -> function that replays this work.

    `prepare` writes the inputs, and is not captured. If a size fails, the failure is logged with the name
    `what`, and the result is empty.
    """
    replays = {}
    for size in sizes:
        try:
            prepare(size)
            replays[size] = recorder.record(partial(compute, size))
        except Exception as error:  # drivers, libraries and kernels raise exceptions of any type
            log_uncaptured(what, size, in_one_line(error))
            return {}
    return replays


def log_uncaptured(what: str, size: object, reason: str) -> None:
    """Log a warning that `what` is not captured, with the size that failed and the reason."""
    log.warning(
        f"{what} cannot be captured in CUDA graphs and are launched kernel by kernel, which is slower for "
        "small steps; set cuda_graphs false to start without the attempt",
        size=str(size),
        reason=reason,
    )


def capture_steps(
    what: str,
    buckets: Sequence[Bucket],
    compute: Callable[[Bucket], None],
    attention: AttentionBackend,
    recorder: Recorder,
    block_size: int,
    capture: Capture = capture,
) -> Replays:
    """Capture work that uses attention, once for each bucket. Each capture runs on a step with only padding.

    Capturing writes to the pool's dummy block.
    """

    def begin(bucket: Bucket) -> None:
        attention.begin(empty_step(bucket, block_size), bucket)

    return capture(what, buckets, begin, compute, recorder)
