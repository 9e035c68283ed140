"""Measure the time of calls. Compared variants run alternately, so a noisy machine disturbs all of them."""

import gc
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class Sample:
    wall: float  # seconds
    cpu: float  # seconds of CPU time, over all threads in this process


def clocked(run: Callable[[], Any]) -> tuple[Sample, Any]:
    """Call `run`, and return the time that the call took and its result."""
    cpu, wall = time.process_time(), time.perf_counter()
    result = run()
    return Sample(time.perf_counter() - wall, time.process_time() - cpu), result


class Rounds:
    """Samples of several variants, keyed by name. Each round adds a sample to each variant."""

    def __init__(self) -> None:
        self.samples: dict[str, list[Sample]] = {}
        self.results: dict[str, Any] = {}  # Each variant's result in the last round.

    def run(
        self, variants: Mapping[str, Callable[[], Any]], rounds: int, tick: Callable[[], None]
    ) -> "Rounds":
        """Run every variant once per round. Every second round has the reverse order. `tick` is called
        after each sample.
        """
        for number in range(rounds):
            for name in list(variants)[:: -1 if number % 2 else 1]:
                gc.collect()  # Otherwise a variant would pay for its predecessor's garbage.
                sample, self.results[name] = clocked(variants[name])
                self.samples.setdefault(name, []).append(sample)
                tick()
        return self

    def wall(self, name: str) -> float:
        return median(sample.wall for sample in self.samples[name])

    def cpu(self, name: str) -> float:
        return median(sample.cpu for sample in self.samples[name])


def usable_cpus() -> list[int]:
    """Return the numbers of the CPUs that this process may use, in ascending order. CPUs with low numbers
    tend to be busier with other work. The list is empty if the system has no sched_getaffinity.
    """
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def use_threads(threads: int) -> None:
    """Limit torch and numpy to this number of threads and CPUs. Call this function before torch and numpy are
    imported.
    """
    for variable in THREAD_VARIABLES:
        os.environ[variable] = str(threads)
    cpus = usable_cpus()
    if len(cpus) > threads:
        os.sched_setaffinity(0, cpus[-threads:])
