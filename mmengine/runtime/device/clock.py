"""Measure how long a step's parts take on a CPU."""

from time import perf_counter_ns, process_time_ns


class LaunchClock:
    """Measures a step's time on an asynchronous device: from one result to the next.

    The time includes both the device's and the engine's share, so two steps in flight are not counted twice.
    """

    __slots__ = ("_before_ns", "_host", "_since_ns")

    def __init__(self) -> None:
        self._host, self._before_ns, self._since_ns = StepClock(), 0, perf_counter_ns()

    def launch(self) -> None:
        """Begin a step while none is in flight. The time since the last result counts as far as this process
        was busy.
        """
        self._before_ns, self._since_ns = self._host.lap(), perf_counter_ns()

    def finish(self) -> int:
        """Return the oldest step's duration in ns; the step was just read."""
        now_ns = perf_counter_ns()
        passed = self._before_ns + now_ns - self._since_ns
        self._before_ns, self._since_ns = 0, now_ns
        self._host.lap()
        return passed


class StepClock:
    """Measures elapsed time, or the process's CPU time if that is less.

    So neither other programs on the same cores nor several threads that compute at once make a step seem
    longer.
    """

    __slots__ = ("_cpu_ns", "_wall_ns")

    def __init__(self) -> None:
        self._wall_ns, self._cpu_ns = perf_counter_ns(), process_time_ns()

    def lap(self) -> int:
        """Return the time since the previous lap, or since creation, in ns."""
        wall_ns, cpu_ns = perf_counter_ns(), process_time_ns()
        passed = min(wall_ns - self._wall_ns, cpu_ns - self._cpu_ns)
        self._wall_ns, self._cpu_ns = wall_ns, cpu_ns
        return passed
