"""A fake for CUDA graphs that replays by calling the captured function again.

As a script, this module runs a tensor-parallel follower rank that replays in the same way.
"""

import itertools
import os
import sys

from mmengine.errors import ExecutorFailed
from mmengine.runtime.attention.native_paged import NativePagedAttention
from mmengine.runtime.attention.torch_paged import TorchPagedAttention
from mmengine.runtime.device.cuda import WARM_UPS


class Repeater:
    """A Recorder that replays by calling the function again, over the same buffers."""

    def __init__(self):
        self.recorded = self.replayed = 0

    def record(self, compute):
        compute()
        self.recorded += 1

        def replay():
            self.replayed += 1
            compute()

        return replay


class Warming(Repeater):
    """A Repeater that also calls the function for warm-up, as CudaRecorder does.

    `fails_at`: the number of the capture that fails, from 1.
    """

    def __init__(self, fails_at=None):
        super().__init__()
        self._fails_at = fails_at

    def record(self, compute):
        for _ in range(WARM_UPS):
            compute()
        replay = super().record(compute)
        if self.recorded == self._fails_at:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        return replay


def let_backends_capture(set_attribute=setattr):
    """Allow the capture of attention backends that allocate tensors in `begin`.

    A CUDA graph would fail for these backends. A Repeater works, because it calls the function again.
    """
    for backend in (NativePagedAttention, TorchPagedAttention):
        set_attribute(backend, "captures", True)


# Environment variable that says where a rank's process fails: the number of the capture that fails, and the
# number of the step that fails (from 1; 0: none). The step fails before any exchange with other ranks.
FAILS = "MMENGINE_TEST_FAILS"
FOLLOWER = (sys.executable, __file__)


def fail_at(number, function):
    """Return a function that calls `function`, but raises ExecutorFailed on call `number` (from 1)."""
    count = itertools.count(1)

    def fails_once(*arguments):
        if next(count) == number:
            raise ExecutorFailed("on purpose")
        return function(*arguments)

    return fails_once


def main():
    """Run a follower that captures with a Repeater and fails where FAILS says."""
    from mmengine.runtime.parallel import follower

    capture, step = map(int, os.environ[FAILS].split())
    let_backends_capture()
    follower.recorder_for = lambda config, device: Warming(capture)
    follower.FollowingRunner._forward = fail_at(step, follower.FollowingRunner._forward)
    code = follower.main()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
