"""Captures the same work in several sizes, all of them or none."""

from collections.abc import Callable, Sequence
from functools import partial

import structlog

from mmengine.errors import in_one_line
from mmengine.runtime.attention.base import AttentionBackend, Bucket
from mmengine.runtime.graphs.buckets import empty_step
from mmengine.runtime.graphs.recorder import Recorder

REPLAYED, CAPTURE_FAILED = "replayed", "capture_failed"  # in metrics

Replays = dict[Bucket, Callable[[], None]]
log = structlog.get_logger("mmengine.operators")


def capture(
    what: str,
    buckets: Sequence[Bucket],
    compute: Callable[[Bucket], None],
    attention: AttentionBackend,
    recorder: Recorder,
    block_size: int,
) -> Replays:
    """What `compute` launches for each of `buckets`, to be launched again behind a step of that size; nothing
    where one of them cannot be captured, which is told as that of `what`. The pool's dummy block is written
    to."""
    replays: Replays = {}
    for bucket in buckets:
        try:
            attention.begin(empty_step(bucket, block_size), bucket)
            replays[bucket] = recorder.record(partial(compute, bucket))
        except Exception as error:  # whatever the driver, a library or a kernel says
            tell(what, bucket, in_one_line(error))
            return {}
    return replays


def tell(what: str, bucket: Bucket, reason: str) -> None:
    """That `what` is not captured, and why."""
    log.warning(
        f"{what} cannot be captured in CUDA graphs and are launched kernel by kernel, which is slower with "
        "few rows; set cuda_graphs false to start without trying",
        rows=bucket.num_rows,
        tokens_per_row=bucket.query_len,
        reason=reason,
    )
