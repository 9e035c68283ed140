"""Run the GPU check's parts, each in its own process with a time limit.

A part that hangs or has a CUDA error does not affect the other parts. Each part can use the whole GPU memory.
The parent process imports all modules and forks the parts, but never initialises CUDA. This module has not
yet run on a GPU.
"""

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from benchmarks.gpu.roofline import Goal
from benchmarks.gpu.tokens import Verdict
from mmengine.errors import in_one_line

PATIENCE = 3  # a part's time limit, as a multiple of its duration on an H100
SHORTEST = 30.0  # minimum time limit in seconds; loading CUDA may take long


class PartReporter:
    """Sends each result to the parent process immediately, so that a stopped part loses no results."""

    def __init__(self, dry: bool, pipe: Connection) -> None:
        self.dry, self._pipe = dry, pipe

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"

    def check(self, verdict: Verdict) -> None:
        self._pipe.send(("checks", verdict.name, verdict))

    def goal(self, name: str, goal: Goal) -> None:
        self._pipe.send(("goals", name, goal))

    def fact(self, name: str, value: object) -> None:
        self._pipe.send(("facts", name, value))

    def skip(self, name: str, why: str) -> None:
        self._pipe.send(("skipped", name, why))

    def fail(self, name: str, why: str) -> None:
        self._pipe.send(("failed", name, why))

    def end(self) -> None:
        self._pipe.send(None)


Work = Callable[[PartReporter], None]


@dataclass(frozen=True, slots=True)
class RunningPart:
    """A part that runs in its own process, and the pipe for its results."""

    name: str
    process: BaseProcess
    pipe: Connection


@dataclass(slots=True)
class Run:
    """The options of a check, its results so far, and the parts that are running."""

    dry: bool
    ends: float  # time limit for all parts, on time.monotonic()'s clock
    out: Path | None
    start: str = "fork"  # start method of the parts' processes
    facts: dict[str, object] = field(default_factory=dict)
    checks: dict[str, Verdict] = field(default_factory=dict)
    goals: dict[str, Goal] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    # part -> seconds for which the parent waited for the part
    seconds: dict[str, float] = field(default_factory=dict)
    _going: list[RunningPart] = field(default_factory=list)

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"

    @property
    def is_right(self) -> bool:
        return not self.failed and all(one.right for one in self.checks.values())

    def part(self, name: str, seconds: float, work: Work) -> None:
        """Run `work`, which takes about `seconds` on an H100, if enough time is left."""
        left = self.ends - time.monotonic()
        if left < seconds:
            self.skipped[name] = f"needs about {seconds:.0f} s; {left:.0f} s are left"
            return
        print(f"{name} …", flush=True)
        self.end(self.begin(name, work), left if self.dry else max(SHORTEST, PATIENCE * seconds))

    def begin(self, name: str, work: Work) -> RunningPart:
        """Start `work` in parallel with the other parts."""
        context = get_context(self.start)
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(name, work, self.dry, theirs), name=name)
        process.start()
        theirs.close()
        self._going.append(RunningPart(name, process, mine))
        return self._going[-1]

    def end(self, going: RunningPart, seconds: float) -> bool:
        """Collect a part's results for at most `seconds`, then stop the part.

        Returns whether the part ended in time and without an error.
        """
        begin = time.monotonic()
        why = self._listen(going, min(begin + seconds, self.ends))
        self._stop(going)
        if why is not None:
            self.failed[going.name] = why
        self.seconds[going.name] = round(time.monotonic() - begin, 1)
        self.write()
        return going.name not in self.failed

    def stop(self) -> None:
        """Stop all running parts."""
        while self._going:
            self._stop(self._going[-1])

    def _listen(self, going: RunningPart, until: float) -> str | None:
        """Receive results until the part ends. Returns None, or why the part did not finish."""
        while going.pipe.poll(max(0.0, until - time.monotonic())):
            try:
                told = going.pipe.recv()
            except EOFError:
                going.process.join(5)
                return f"its process ended with exit code {going.process.exitcode} (negative: a signal)"
            if told is None:
                going.process.join(5)
                return None
            kind, name, value = told
            getattr(self, kind)[name] = value
        return "cut off: time limit reached"

    def _stop(self, going: RunningPart) -> None:
        """Kill the part's process and child processes, if the part still runs.

        Waits for at most 5 s, because a process that hangs in the driver may never end.
        """
        if going.process.is_alive():
            try:
                os.killpg(going.process.pid, signal.SIGKILL)
            except ProcessLookupError:  # the process has just ended, or has no group yet
                going.process.kill()
            going.process.join(5)
        going.pipe.close()
        self._going.remove(going)

    def write(self) -> None:
        """Write the results so far. Called after every part, in case the run is interrupted."""
        if self.out is not None:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self.out.write_text(json.dumps(self.as_dict(), indent=1) + "\n", encoding="utf-8")

    def as_dict(self) -> dict[str, object]:
        checks = {
            one.name: {"right": one.right, "said": one.said, "notes": one.notes}
            for one in self.checks.values()
        }
        targets = {name: goal.as_dict() for name, goal in self.goals.items()}
        return self.facts | {
            "checks": checks,
            "targets": targets,
            "skipped": self.skipped,
            "failed": self.failed,
            "seconds": self.seconds,
        }


def _work(name: str, work: Work, dry: bool, pipe: Connection) -> None:
    """Run a part in its own process."""
    os.setpgrp()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    teller = PartReporter(dry, pipe)
    try:
        work(teller)
    except Exception as error:  # a part that fails must not affect the others
        teller.fail(name, in_one_line(error))
    teller.end()
