"""CUDA graphs over several ranks: captured by all of them or by none, one after the other in the same order.

To NCCL a captured exchange is another than a launched one, and a replay is one of all ranks: each must replay
the graph that it captured together with the others. So every rank decides from the plan alone whether a step
is replayed, and one that cannot go on replays the step without rows (group.py). While capturing, which may
fail on one rank only, the ranks say a word to one another before each pass. Not yet run on a GPU.
"""

from collections.abc import Callable, Iterable
from functools import partial

import structlog

from mmengine.errors import in_one_line
from mmengine.runtime.attention.base import Bucket
from mmengine.runtime.device.port import Recorder
from mmengine.runtime.graphs.capture import Replays, tell
from mmengine.runtime.parallel.group import GroupLost, StepGroup
from mmengine.runtime.runner import ModelRunner

Agree = Callable[[str], bool]  # whether all ranks say this word; a rank says none where it cannot go on
DONE = "done"
log = structlog.get_logger("mmengine.operators")


def capture_steps(runner: ModelRunner, recorder: Recorder | None, group: StepGroup, agree: Agree) -> None:
    """On all ranks at once: steps that only decode are replayed from now on, where all can. `recorder`: None
    where this rank is not to."""
    word = runner.captures if recorder is not None else ""
    if agree(word) and recorder is not None:
        runner.capture(recorder, SharedCapture(group, agree))
        group.graphs = runner.graphs
    elif word:
        log.warning("steps are launched kernel by kernel: the ranks of tensor_parallel capture other ones")


class OtherRank(Exception):
    """One of the others cannot go on."""


class SharedCapture:
    """See Capture; on each rank with its own group and way to the others."""

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
            self._all_say(DONE)
        except (OtherRank, GroupLost) as error:
            if self._group.lost:
                raise
            tell(what, bucket, str(error))
            return {}
        except Exception as error:
            self._agree("")
            tell(what, bucket, in_one_line(error))
            return {}
        return replays

    def _pass(self, compute: Callable[[Bucket], None], bucket: Bucket) -> None:
        if self._group.replays:  # a function in a graph's place
            compute(bucket)
            return
        self._all_say(f"{bucket.num_rows} rows of {bucket.query_len}")
        with self._group.recording(bucket):
            compute(bucket)

    def _all_say(self, word: str) -> None:
        if not self._agree(word):
            raise OtherRank("another rank could not, or is elsewhere")
