"""Captures CUDA graphs on all ranks, in the same order. If a capture fails on one rank, no rank uses graphs.
Not yet run on a GPU.

NCCL cannot pair an exchange in a replayed graph with an exchange outside a graph. In each step, therefore,
either all ranks replay the same graph, or no rank replays. All ranks choose alike, because the choice depends
only on the plan. A rank that fails in a step replays the graph with padding only (group.py).

A capture may fail on a single rank. Before each captured pass and each warm-up pass, each rank sends a word
that describes its progress. The ranks continue only if all words are equal.
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

# A function that sends this rank's word, and returns whether all ranks sent the same word. The word "" says
# that this rank has failed or does not capture.
Agree = Callable[[str], bool]
DONE = "done"
log = structlog.get_logger("mmengine.operators")


def capture_steps(runner: ModelRunner, recorder: Recorder | None, group: StepGroup, agree: Agree) -> None:
    """Capture decode-only steps on all ranks together. If all captures succeed, steps are replayed from now
    on.

    `recorder`: None if this rank does not capture.
    """
    word = runner.captures if recorder is not None else ""
    if agree(word) and recorder is not None:
        runner.capture(recorder, SharedCapture(group, agree))
        group.graphs = runner.graphs
    elif word:
        log.warning(
            "steps are launched kernel by kernel: the tensor_parallel ranks would capture different steps"
        )


class OtherRankFailed(Exception):
    """Another rank sent a different word, because it has failed or is out of step."""


class SharedCapture:
    """Implements Capture (runtime/graphs/capture.py) together with the other ranks."""

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
        if self._group.replays:  # only in tests, in which a replay calls this function again
            compute(bucket)
            return
        self._check_all_agree(f"{bucket.num_rows} rows of {bucket.query_len}")
        with self._group.recording(bucket):
            compute(bucket)

    def _check_all_agree(self, word: str) -> None:
        if not self._agree(word):
            raise OtherRankFailed("another rank failed or is out of step")
