"""What parts of a step took on a CPU."""

from time import perf_counter_ns, process_time_ns


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
