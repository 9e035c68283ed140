"""A fake for CUDA graphs: a Python function over the same buffers, on this rank and on others."""

import itertools
import os
import sys

from mmengine.errors import ExecutorFailed
from mmengine.runtime.attention.native_paged import NativePagedAttention
from mmengine.runtime.attention.torch_paged import TorchPagedAttention
from mmengine.runtime.device.cuda import WARM_UPS


class Repeater:
    """Replays by calling the function again."""

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
    """Calls the function as often as a capture of CUDA graphs would. `fails_at`: the capture that fails."""

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
    """Capture backends that make tensors in `begin`: a CUDA graph could not, but a function can."""
    for backend in (NativePagedAttention, TorchPagedAttention):
        set_attribute(backend, "captures", True)


# Environment variables that tell a rank's process where to fail: the number of a capture, and of a step that
# fails before it exchanges anything; 0 for none.
FAILS = "MMENGINE_TEST_FAILS"
FOLLOWER = (sys.executable, __file__)


def fail_at(number, function):
    """Return `function`, which raises on its call with this number."""
    count = itertools.count(1)

    def fails_once(*arguments):
        if next(count) == number:
            raise ExecutorFailed("on purpose")
        return function(*arguments)

    return fails_once


def main():
    """A following rank that captures."""
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
