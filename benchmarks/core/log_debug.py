"""Measures how long the debugger of logs takes to reach a position in a log of a million steps.

    python -m benchmarks log_debug [--steps N] [--log DIR]

Without --log the program writes a log on the simulated executor, which takes many minutes. It reads the log
once to its end, which saves states, and then seeks: positions at random, the step before, a time, and the
last write of a block. It also opens the log again, with the states that it kept in the cache.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.common.report import cpu_model
from benchmarks.core.report_page import write_log
from mmengine.replay.debug import Debugger, open_debugger
from mmengine.replay.debug.saved.marks import states_of

SEEKS = 100


def measured(title: str, seek: Callable[[], object], count: int) -> str:
    """Return a row of the table: the wall and CPU times of `count` calls, in ms."""
    wall, cpu = [], []
    for _ in range(count):
        begin, used = time.perf_counter(), time.process_time()
        seek()
        wall.append(1e3 * (time.perf_counter() - begin))
        cpu.append(1e3 * (time.process_time() - used))
    cells = []
    for times in (wall, cpu):
        times.sort()
        cells += [times[count // 2], times[int(count * 0.99)], times[-1]]
    return f"| {title} | {count} | " + " | ".join(f"{cell:.0f}" for cell in cells) + " |"


def seeks(debugger: Debugger, num_steps: int) -> list[str]:
    """Return the table's rows."""
    rng = random.Random(0)
    end = debugger.navigator.end or 0

    def to_step() -> None:
        debugger.goto_step(rng.randrange(num_steps))

    def to_record() -> None:
        debugger.goto_event(rng.randrange(end))

    rows = [measured("goto STEP, at random", to_step, SEEKS)]
    rows.append(measured("goto event N, at random", to_record, SEEKS))
    debugger.goto_event(end // 2)
    rows.append(measured("reverse-step", lambda: debugger.step(-1), SEEKS // 3))
    rows.append(measured("reverse-stepi", lambda: debugger.step_event(-1), SEEKS // 3))
    debugger.goto_event(end - 10)
    rows.append(measured("last block N", lambda: debugger.last_write(f"block {rng.randrange(1, 161)}"), 60))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--log", type=Path, help="log to read, which a run of this program wrote")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = options.log
        if log is None:
            log = Path(folder) / "log"
            write_log(log, options.steps)
        begin, used = time.perf_counter(), time.process_time()
        debugger = open_debugger(log)
        debugger.goto_end()
        took, cpu = time.perf_counter() - begin, time.process_time() - used
        marks, num_steps = debugger.navigator.marks, debugger.navigator.state.step
        size = sum(each.num_bytes for each in states_of(marks.all))
        print(f"{cpu_model()}; {num_steps:,} steps, {debugger.navigator.end:,} records")
        print(
            f"first read to the end: {took:.0f} s ({cpu:.0f} s CPU); {len(marks.all):,} saved states, "
            f"{size / 2**20:.0f} MiB\n"
        )
        debugger.navigator.keep()
        begin = time.perf_counter()
        again = open_debugger(log)
        opened = time.perf_counter() - begin
        again.goto_step(num_steps // 2)
        there = time.perf_counter() - begin
        print(f"opened again in {opened:.1f} s; step {num_steps // 2:,} after {there:.1f} s\n")
        print("| | count | wall ms p50 | p99 | most | CPU ms p50 | p99 | most |")
        print("|---|---:|---:|---:|---:|---:|---:|---:|")
        for row in seeks(debugger, num_steps):
            print(row, flush=True)


if __name__ == "__main__":
    main()
