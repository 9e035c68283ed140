"""Capture CUDA graphs over several ranks: all ranks capture, or none, in the same order.

NCCL treats a captured exchange differently from a launched exchange, and all ranks replay together: each rank
must replay the graph that it captured with the others. So each rank decides from the plan alone whether a
step is replayed, and a rank that cannot continue replays the step without rows (group.py). A capture may fail
on one rank only, so the ranks exchange a word before each pass. Not yet run on a GPU.
"""

from collections.abc import Callable, Iterable
from functools import partial

import structlog

from mmengine.errors import in_one_line
from mmengine.runtime.attention.base import Bucket
from mmengine.runtime.device.port import Recorder
from mmengine.runtime.graphs.capture import Replays, log_uncaptured
from mmengine.runtime.parallel.group import GroupLost, StepGroup
from mmengine.runtime.runner import ModelRunner

# whether all ranks say the same word; a rank that cannot continue says the empty word
Agree = Callable[[str], bool]
DONE = "done"
log = structlog.get_logger("mmengine.operators")


def capture_steps(runner: ModelRunner, recorder: Recorder | None, group: StepGroup, agree: Agree) -> None:
    """Capture decode-only steps on all ranks at once, and replay them from now on if all ranks succeeded.

    `recorder`: None if this rank must not capture.
    """
    word = runner.captures if recorder is not None else ""
    if agree(word) and recorder is not None:
        runner.capture(recorder, SharedCapture(group, agree))
        group.graphs = runner.graphs
    elif word:
        log.warning("steps are launched kernel by kernel: the ranks of tensor_parallel capture other ones")


class OtherRankFailed(Exception):
    """Another rank cannot continue."""


class SharedCapture:
    """Captures on several ranks; see Capture. Each rank has its own group and channel."""

    def __init__(self, group: StepGroup, agree: Agree) -> None:
        self._group, self._agree = group, agree

    def __call__(
        self,
        what: str,
        buckets: Iterable[Bucket],
        prepare: Callable[[Bucket], object],
        compute: Callable[[Bucket], None],
        recorder: Recorder,
    ) -> Replays:
        replays: Replays = {}
        bucket: Bucket | None = None
        try:
            for bucket in buckets:
                prepare(bucket)
                replay = recorder.record(partial(self._pass, compute, bucket))
                replays[bucket] = partial(self._group.replay, bucket, replay)
            self._check_all_agree(DONE)
        except (OtherRankFailed, GroupLost) as error:
            if self._group.lost:
                raise
            log_uncaptured(what, bucket, str(error))
            return {}
        except Exception as error:
            self._agree("")
            log_uncaptured(what, bucket, in_one_line(error))
            return {}
        return replays

    def _pass(self, compute: Callable[[Bucket], None], bucket: Bucket) -> None:
        if self._group.replays:  # in tests a function replaces the graph
            compute(bucket)
            return
        self._check_all_agree(f"{bucket.num_rows} rows of {bucket.query_len}")
        with self._group.recording(bucket):
            compute(bucket)

    def _check_all_agree(self, word: str) -> None:
        if not self._agree(word):
            raise OtherRankFailed("another rank failed or is out of step")
