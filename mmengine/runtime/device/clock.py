"""What parts of a step took on a CPU."""

from time import perf_counter_ns, process_time_ns


class LaunchClock:
    """What steps take on a device to which they are launched: from one result to the next, whatever of that
    was the device's time and whatever the engine's; so two steps in flight are not counted twice."""

    __slots__ = ("_before_ns", "_host", "_since_ns")

    def __init__(self) -> None:
        self._host, self._before_ns, self._since_ns = StepClock(), 0, perf_counter_ns()

    def launch(self) -> None:
        """A step begins, and none is in flight: what passed counts as far as this process had work."""
        self._before_ns, self._since_ns = self._host.lap(), perf_counter_ns()

    def back(self) -> int:
        """The oldest step was read: ns that it took."""
        now_ns = perf_counter_ns()
        passed = self._before_ns + now_ns - self._since_ns
        self._before_ns, self._since_ns = 0, now_ns
        self._host.lap()
        return passed


class StepClock:
    """Counts the time that passes, or the CPU time of the process where that is less: other programs on the
    same cores then do not make a step seem longer, and several threads that compute at once do not either."""

    __slots__ = ("_cpu_ns", "_wall_ns")

    def __init__(self) -> None:
        self._wall_ns, self._cpu_ns = perf_counter_ns(), process_time_ns()

    def lap(self) -> int:
        """ns since it was made, or since the lap before."""
        wall_ns, cpu_ns = perf_counter_ns(), process_time_ns()
        passed = min(wall_ns - self._wall_ns, cpu_ns - self._cpu_ns)
        self._wall_ns, self._cpu_ns = wall_ns, cpu_ns
        return passed
