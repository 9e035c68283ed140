"""Captures the same work in several sizes, all of them or none."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

import structlog

from mmengine.config import EngineConfig
from mmengine.errors import in_one_line
from mmengine.runtime.attention.base import AttentionBackend, Bucket
from mmengine.runtime.device.port import Device, Recorder
from mmengine.runtime.graphs.buckets import empty_step

REPLAYED, CAPTURE_FAILED = "replayed", "capture_failed"  # in metrics

Size = TypeVar("Size")
Replays = dict[Bucket, Callable[[], None]]
# As `capture` below, perhaps together with others.
Capture = Callable[
    [str, Iterable[Bucket], Callable[[Bucket], object], Callable[[Bucket], None], Recorder], Replays
]
log = structlog.get_logger("mmengine.operators")


def recorder_for(config: EngineConfig, device: Device) -> Recorder | None:
    """What captures on `device` as `config` has it; None: nothing does."""
    return device.recorder() if config.cuda_graphs else None


def capture(
    what: str,
    sizes: Iterable[Size],
    prepare: Callable[[Size], object],
    compute: Callable[[Size], None],
    recorder: Recorder,
) -> dict[Size, Callable[[], None]]:
    """What `compute` launches for each of `sizes`, to be launched again; `prepare` writes before what it
    reads, and is not captured. Nothing where one of them cannot be, which is told as that of `what`."""
    replays = {}
    for size in sizes:
        try:
            prepare(size)
            replays[size] = recorder.record(partial(compute, size))
        except Exception as error:  # whatever the driver, a library or a kernel says
            tell(what, size, in_one_line(error))
            return {}
    return replays


def tell(what: str, size: object, reason: str) -> None:
    """That `what` is not captured, because of which size, and why."""
    log.warning(
        f"{what} cannot be captured in CUDA graphs and are launched kernel by kernel, which is slower where "
        "they are small; set cuda_graphs false to start without trying",
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
    """`capture` of what attends to KV blocks, behind a step of each of `buckets`. The pool's dummy block is
    written to."""

    def begin(bucket: Bucket) -> None:
        attention.begin(empty_step(bucket, block_size), bucket)

    return capture(what, buckets, begin, compute, recorder)
