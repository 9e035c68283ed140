"""Clocks that measure how long steps take: on a CPU, and on a device that computes asynchronously."""

from time import perf_counter_ns, process_time_ns


class LaunchClock:
    """Measures a step's time on an asynchronous device, from one step's result to the next step's.

    This includes the device's and the engine's work. The time in which two steps are in flight is
    counted once.
    """

    __slots__ = ("_before_ns", "_host", "_since_ns")

    def __init__(self) -> None:
        self._host, self._before_ns, self._since_ns = StepClock(), 0, perf_counter_ns()

    def launch(self) -> None:
        """Begin a step while no step is in flight.

        Of the time since the last result, only the time in which this process was busy is counted.
        """
        self._before_ns, self._since_ns = self._host.lap(), perf_counter_ns()

    def finish(self) -> int:
        """Return the oldest step's duration in ns, whose result was just read."""
        now_ns = perf_counter_ns()
        passed = self._before_ns + now_ns - self._since_ns
        self._before_ns, self._since_ns = 0, now_ns
        self._host.lap()
        return passed


class StepClock:
    """Measures elapsed time, or the process's CPU time if that is less.

    So a step does not seem longer if other programs use the same cores (they add elapsed time) or if several
    threads compute at once (they add CPU time).
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
