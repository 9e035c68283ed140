"""The GPU's idle time between kernels, from torch's profiler. Not yet run on a GPU."""

from collections.abc import Iterable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


class Idle:
    """A context manager that measures how long the GPU is idle between the first and the last kernel.

    On exit `share` is set: the idle time divided by the whole time. The profiler slows the host down, so
    `share` is an upper bound.
    """

    def __init__(self) -> None:
        self.share = 0.0
        self._profiler = profile(activities=[ProfilerActivity.CUDA])

    def __enter__(self) -> "Idle":
        torch.cuda.synchronize()
        self._profiler.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        torch.cuda.synchronize()
        self._profiler.__exit__(*error)
        events = [event for event in self._profiler.events() if event.device_type == DeviceType.CUDA]
        self.share = idle_share((event.time_range.start, event.time_range.end) for event in events)


def idle_share(spans: Iterable[tuple[float, float]]) -> float:
    """Return the share of the total time that no (begin, end) span covers.

    The total time is from the first begin to the last end.
    """
    ordered = sorted(spans)
    if not ordered:
        raise ValueError("the profiler recorded no kernel")
    busy, reached = 0.0, ordered[0][0]
    for begin, end in ordered:
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    whole = reached - ordered[0][0]
    return 1 - busy / whole if whole else 0.0
