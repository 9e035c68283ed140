"""Clocks that measure steps' durations, on a CPU and on a device that computes asynchronously."""

from time import perf_counter_ns, process_time_ns


class LaunchClock:
    """Measures steps' durations on an asynchronous device. A step lasts from the previous step's result
    to its own result.

    The duration includes the device's and the engine's work. Time in which two steps overlap counts once.
    """

    __slots__ = ("_before_ns", "_host", "_since_ns")

    def __init__(self) -> None:
        self._host, self._before_ns, self._since_ns = StepClock(), 0, perf_counter_ns()

    def launch(self) -> None:
        """Begin a step while no step is in flight.

        Between the last result and this call, only this process's CPU time counts. Idle time does not count.
        """
        self._before_ns, self._since_ns = self._host.lap(), perf_counter_ns()

    def finish(self) -> int:
        """Return the oldest step's duration in ns. Call this after reading the step's result."""
        now_ns = perf_counter_ns()
        passed = self._before_ns + now_ns - self._since_ns
        self._before_ns, self._since_ns = 0, now_ns
        self._host.lap()
        return passed


class StepClock:
    """Measures elapsed time, or the process's CPU time if the CPU time is less.

    Other programs on the same cores increase the elapsed time, and several computing threads increase the CPU
    time. A step should not seem longer in either case.
    """

    __slots__ = ("_cpu_ns", "_wall_ns")

    def __init__(self) -> None:
        self._wall_ns, self._cpu_ns = perf_counter_ns(), process_time_ns()

    def lap(self) -> int:
        """Return the time in ns since the previous lap, or since this object was created."""
        wall_ns, cpu_ns = perf_counter_ns(), process_time_ns()
        passed = min(wall_ns - self._wall_ns, cpu_ns - self._cpu_ns)
        self._wall_ns, self._cpu_ns = wall_ns, cpu_ns
        return passed
