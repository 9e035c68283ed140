"""Measures how long the log debugger takes to seek in a log of a million steps.

    python -m benchmarks log_debug [--steps N] [--log DIR] [--cache DIR] [--out FILE]

Without --log the program first writes a log with the simulated executor, which takes many minutes. The load
exceeds the engine's throughput, so the queue is full (4,096 requests) in most of the log. The program reads
the log once to its end, and the debugger saves states during this read. Then the program measures seeks in
the same process, after opening the log again, and in new processes. With --cache, the debugger uses the saved
states of an earlier run.

Garbage collection is paused during the read and during seeks, as in `mmengine log debug`. On a busy machine,
only the CPU times are reliable.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.common.report import Table, Target, finish
from benchmarks.core.report_page import write_log
from mmengine.paused_collection import paused_collection
from mmengine.replay.debug import Debugger, open_debugger

PROCESSES = 10
BAR_MS = 300.0
IN_A_PROCESS = """
import json, sys, time
from pathlib import Path
from mmengine.paused_collection import paused_collection
from mmengine.replay.debug import open_debugger
times = []
def clocks():
    times.append((time.perf_counter(), time.process_time()))
with paused_collection():
    clocks()
    debugger = open_debugger(Path(sys.argv[1]))
    clocks()
    debugger.goto_step(int(sys.argv[2]))
    clocks()
    debugger.goto_step(int(sys.argv[3]))
    clocks()
print(json.dumps(times))
"""
Times = list[tuple[float, float]]  # (wall, CPU) in ms


class Seeks:
    """The table of seeks. `count`: number of seeks per row. `worst`: the largest p99 of the rows with a
    target, as [wall, CPU] in ms.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        columns = ("ms", "seeks", "wall p50", "p99", "most", "CPU p50", "p99", "most")
        self.table = Table("Seeks", columns)
        self.worst = [0.0, 0.0]

    def measure(self, title: str, seek: Callable[[int], object], places: Iterable[int]) -> None:
        times: Times = []
        for place in places:
            with paused_collection():
                begin, used = time.perf_counter(), time.process_time()
                seek(place)
                took, cpu = time.perf_counter() - begin, time.process_time() - used
            times.append((1e3 * took, 1e3 * cpu))
        self.add(title, times)
        print(title, *self.table.rows[-1][1:], flush=True)

    def add(self, title: str, times: Times, is_bounded: bool = True) -> None:
        cells = []
        for kind in (0, 1):
            values = sorted(each[kind] for each in times)
            p99 = values[int(len(values) * 0.99)]
            cells += [values[len(values) // 2], p99, values[-1]]
            if is_bounded:
                self.worst[kind] = max(self.worst[kind], p99)
        self.table.rows.append((title, f"{len(times)}", *(f"{cell:.0f}" for cell in cells)))

    def in_this_process(self, debugger: Debugger, where: str, rng: random.Random, end: int) -> None:
        navigator = debugger.navigator
        num_steps = next(mark.step for mark in navigator.marks.all[::-1])
        steps = [rng.randrange(num_steps) for _ in range(self.count)]
        positions = [rng.randrange(navigator.first, end) for _ in range(self.count)]
        self.measure(f"goto STEP, random, {where}", debugger.goto_step, steps)
        self.measure(f"goto event N, random, {where}", debugger.goto_event, positions)
        self.measure(f"goto event N, forward, {where}", debugger.goto_event, sorted(positions))
        self.measure(f"goto event N, backward, {where}", debugger.goto_event, sorted(positions)[::-1])


def short_moves(seeks: Seeks, debugger: Debugger, rng: random.Random, end: int) -> None:
    """Measure moves that search backwards."""
    debugger.goto_event(end // 2)
    seeks.measure("reverse-step", lambda _: debugger.step(-1), range(seeks.count // 3))
    seeks.measure("reverse-stepi", lambda _: debugger.step_event(-1), range(seeks.count // 3))
    debugger.goto_event(end - 10)
    blocks = [rng.randrange(1, 161) for _ in range(seeks.count // 3)]
    seeks.measure("last block N", lambda block: debugger.last_write(f"block {block}"), blocks)


def in_new_processes(seeks: Seeks, log: Path, num_steps: int, rng: random.Random) -> None:
    """Open the log in new processes. Each process seeks two random steps."""
    parts: list[Times] = [[], [], []]
    for _ in range(PROCESSES):
        steps = [str(rng.randrange(num_steps)) for _ in range(2)]
        command = [sys.executable, "-c", IN_A_PROCESS, str(log), *steps]
        times = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        for part, before, after in zip(parts, times, times[1:], strict=False):
            part.append((1e3 * (after[0] - before[0]), 1e3 * (after[1] - before[1])))
    seeks.add("opening the log, new process", parts[0], is_bounded=False)
    seeks.add("first goto STEP, new process", parts[1])
    seeks.add("second goto STEP, new process", parts[2])


@paused_collection()
def read(log: Path) -> tuple[Debugger, Table]:
    """Read the log to its end, and return the debugger and a table of this read."""
    begin, used = time.perf_counter(), time.process_time()
    debugger = open_debugger(log)
    navigator = debugger.navigator
    start = navigator.marks.last.position
    debugger.goto_end()
    took, cpu = time.perf_counter() - begin, time.process_time() - used
    navigator.keep()
    marks, num_records = navigator.marks, (navigator.end or 0) - start
    cached = sum(path.stat().st_size for path in Path(os.environ["XDG_CACHE_HOME"]).rglob("*.states"))
    table = Table("First read", ("", ""))
    table.rows += [
        ("steps", f"{navigator.state.step:,}"),
        ("records", f"{navigator.end:,}"),
        ("records that were read, not taken from the cache", f"{num_records:,}"),
        ("s, wall", f"{took:.0f}"),
        ("s, CPU", f"{cpu:.0f}"),
        ("µs of CPU per record", f"{1e6 * cpu / max(1, num_records):.0f}"),
        ("saved states", f"{len(marks.all):,}"),
        ("MiB, saved states in memory", f"{marks.num_bytes / 2**20:.0f}"),
        ("MiB, file in the cache", f"{cached / 2**20:.0f}"),
    ]
    print(*(": ".join(row) for row in table.rows), sep="\n", flush=True)
    return debugger, table


def measure(log: Path, options: argparse.Namespace) -> None:
    debugger, table = read(log)
    seeks, rng, end = Seeks(options.seeks), random.Random(0), debugger.navigator.end or 0
    num_steps = debugger.navigator.marks.last.step
    seeks.in_this_process(debugger, "same process", rng, end)
    worst = tuple(seeks.worst)
    short_moves(seeks, debugger, rng, end)
    seeks.worst = list(worst)
    seeks.in_this_process(open_debugger(log), "opened again", rng, end)
    in_new_processes(seeks, log, num_steps, rng)
    targets = [
        Target("p99 of a seek, ms of wall time", seeks.worst[0], BAR_MS, most=True),
        Target("p99 of a seek, ms of CPU time", seeks.worst[1], BAR_MS, most=True),
    ]
    finish("Seeking in a long log", [table, seeks.table], targets, options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_240_000, help="default: makes about a million steps")
    parser.add_argument("--log", type=Path, help="log to read, which a run of this program wrote")
    parser.add_argument("--cache", type=Path, help="folder of the saved states (default: a temporary one)")
    parser.add_argument(
        "--seeks", type=int, default=100, help="number of seeks for each row in the table (default 100)"
    )
    parser.add_argument("--json", action="store_true", help="print the targets as a last line of JSON")
    parser.add_argument("--out", type=Path, help="Markdown file for the tables")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = str(options.cache or Path(folder) / "cache")
        log = options.log
        if log is None:
            log = Path(folder) / "log"
            write_log(log, options.steps)
        measure(log, options)


if __name__ == "__main__":
    main()
