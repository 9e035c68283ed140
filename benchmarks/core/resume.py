"""Measures the time until a restarted server with a long log decides its next step.

    python -m benchmarks resume [--quick]

A process with the simulated executor writes a log: first long prompts, then 500 concurrent requests. When the
next snapshot is almost due, the process exits abruptly. Another process resumes the log and decides a step:

    snapshot   start from the newest snapshot, as usual
    whole      ignore the snapshots and read the whole log

"open and read" covers repairing the log's end and rebuilding the state. "to the first decided step" adds the
event RECOVERED and the scheduler's decision. "MB read" is the total size of the opened segments and
snapshots.

The log is in the page cache. New requests with 800 prompt tokens replace ended requests, about once per step.
One answer in ten stays undelivered.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import mmengine.core.snapshot.snapshot as snapshots
from benchmarks.common.report import Table, machine_lines, show
from mmengine.config import EngineConfig
from mmengine.core.continuation import open_log
from mmengine.core.engine import EngineCore
from mmengine.core.resume import Resume
from mmengine.events import reader, recovery
from mmengine.events.log import LogWriter
from mmengine.events.snapshots import SnapshotFolder
from mmengine.events.writer import SEGMENT_BYTES
from mmengine.request import Request, SamplingParams
from mmengine.simulation.simulated_executor import SimulatedExecutor

# Live requests, tokens in a prompt, and tokens in an answer (from ANSWER / 2 to 2 * ANSWER).
LIVE, PROMPT, ANSWER = 500, 800, 500
BENCHMARKS = Path(__file__).resolve().parents[1]
LONG = 32_000  # approximate number of tokens in each long prompt
LOG_BYTES, QUICK_BYTES = 5 * 10**9, 50 * 10**6
BAR_S = 2.0
EXECUTORS = {"weights": "simulated"}


def settings(quick: bool) -> EngineConfig:
    longest = PROMPT + 2 * ANSWER if quick else LONG + 512
    rows = LIVE // 10 if quick else LIVE
    blocks = rows * ((PROMPT + 2 * ANSWER) // 16 + 1) + 4 * longest // 16
    return EngineConfig(
        max_num_seqs=rows,
        token_budget=max(65_536, 2 * rows),
        max_model_len=longest,
        num_blocks=blocks,
        encoder_cache_size=64,
    )


class Load:
    """Submits requests to an engine and delivers their answers."""

    def __init__(self, core: EngineCore):
        self.core, self.number = core, 0
        self.draws = np.random.default_rng(0)

    def ask(self, length: int, max_tokens: int) -> None:
        prompt = self.draws.integers(0, 150_000, length, np.int32)
        sampling = SamplingParams(max_tokens=max_tokens, seed=1)
        self.core.submit(Request(f"request {self.number}", prompt, sampling))
        self.number += 1

    def step(self, keep_every: int = 0) -> None:
        """Run a step. With `keep_every` above 0, one answer in `keep_every` is not delivered."""
        for output in self.core.step():
            number = int(output.request_id.split()[1])
            if output.finish_reason is not None and not (keep_every and number % keep_every == 0):
                self.core.delivered(output.request_id)


class Timed(SnapshotFolder):
    """Records the CPU time for snapshots in the engine's thread and in the writing thread."""

    seconds: list[float] = []
    began = writing_s = 0.0

    def is_due(self, num_bytes: int, num_records: int) -> bool:
        self.began = time.thread_time()
        return super().is_due(num_bytes, num_records)

    def put(self, sequence: int, make: Callable[[], bytes | bytearray], num_bytes: int) -> None:
        super().put(sequence, make, num_bytes)
        self.seconds.append(time.thread_time() - self.began)

    def flush(self) -> None:
        begin = time.thread_time()
        super().flush()
        self.writing_s = max(self.writing_s, time.thread_time() - begin)


def write(folder: Path, quick: bool) -> None:
    """Write a log, print the snapshots' times as JSON, and exit abruptly."""
    config = settings(quick)
    sink = LogWriter(folder, pack_full=False, segment_bytes=SEGMENT_BYTES // (8 if quick else 1))
    taken = Timed(folder, config.snapshot_bytes, in_background=True)
    core = EngineCore(config, SimulatedExecutor(config), sink=sink, fingerprints=EXECUTORS, snapshots=taken)
    load = Load(core)
    while core.sink.num_bytes < (QUICK_BYTES if quick else LOG_BYTES):
        while len(core.state.requests) + len(core.inbox.queued) < 4:
            load.ask(config.max_model_len - 2 * ANSWER, 2)
        load.step()
        core.tidy()
    begin, num_snapshots, period = core.sink.next_sequence, len(taken.seconds), 0
    while len(taken.seconds) < num_snapshots + 2 or core.sink.next_sequence - begin < 0.95 * period:
        while len(core.state.requests) + len(core.inbox.queued) < config.max_num_seqs:
            load.ask(PROMPT, int(load.draws.integers(ANSWER // 2, 2 * ANSWER)))
        before = len(taken.seconds)
        load.step(keep_every=10)
        if len(taken.seconds) > before:
            core.tidy()
            period, begin = core.sink.next_sequence - begin, core.sink.next_sequence
    steady = {"taking_s": max(taken.seconds[num_snapshots:]), "writing_s": taken.writing_s}
    size = max(path.stat().st_size for path in folder.glob("*.mmsnap"))
    print(json.dumps({**steady, "snapshot_bytes": size}), flush=True)
    os._exit(0)


@contextmanager
def counted() -> Iterator[list[int]]:
    """Yield a list that collects the sizes of opened segments and snapshots."""
    sizes: list[int] = []
    opened, read = recovery.opened, snapshots.read_snapshot

    @contextmanager
    def noted(path: Path) -> Iterator[Any]:
        with opened(path) as data:
            sizes.append(len(data))
            yield data

    def noted_snapshot(folder: Path, sequence: int) -> bytes:
        data = read(folder, sequence)
        sizes.append(len(data))
        return data

    recovery.opened = reader.opened = noted
    snapshots.read_snapshot = noted_snapshot
    yield sizes


def read(folder: Path, quick: bool, whole: bool) -> None:
    """Continue the log until a step is decided, and print the times as JSON."""
    config = settings(quick)
    executor = SimulatedExecutor(config)
    with counted() as sizes:
        begin, begin_cpu = time.perf_counter(), time.thread_time()
        resume = Resume(wanted=(lambda name: False) if whole else None)
        opened = open_log(folder, resume, config, pack_full=False)
        read_s = time.perf_counter() - begin
        resumed = opened.resumed
        assert resumed is not None
        opened.check_fingerprints(EXECUTORS, resume)
        core = opened.core(config, executor, EXECUTORS)
        core.recover(resumed.recovered(()))
        core.step()
        all_s, cpu_s = time.perf_counter() - begin, time.thread_time() - begin_cpu
    assert executor._plans, "a step was given to the device"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    told = {"read_s": read_s, "all_s": all_s, "cpu_s": cpu_s, "bytes": sum(sizes), "peak": peak}
    told |= {"live": len(resumed.state.requests), "answers": len(resumed.answers)}
    print(json.dumps(told), flush=True)
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the restart time of a server with a long log.")
    parser.add_argument("--quick", action="store_true", help="use a log of 50 MB and 50 requests")
    parser.add_argument("--json", action="store_true", help="print the figures as a last line of JSON")
    parser.add_argument("--folder", type=Path, help="folder for the log, which is deleted afterwards")
    parser.add_argument("--part", choices=("write", "snapshot", "whole"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part == "write":
        write(args.folder, args.quick)
    elif args.part is not None:
        read(args.folder, args.quick, whole=args.part == "whole")
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        found = {}
        for part in (
            "write",
            "snapshot",
            "whole",
        ):  # "snapshot" runs before "whole", because each restart changes the log
            words = [sys.executable, str(BENCHMARKS), "resume", "--part", part, "--folder", f"{name}/log"]
            done = subprocess.run(words + ["--quick"] * args.quick, stdout=subprocess.PIPE, check=True)
            found[part] = json.loads(done.stdout)
        size = sum(path.stat().st_size for path in Path(name, "log").glob("*.mmlog"))
    report(found, size)
    if args.json:
        print(json.dumps(found))


def report(found: dict[str, dict[str, float]], size: int) -> None:
    table = Table(
        f"A log of {size / 1e9:.2f} GB, {found['snapshot']['live']} live requests and "
        f"{found['snapshot']['answers'] - found['snapshot']['live']} undelivered answers",
        ("", "open and read, s", "to the first decided step, s", "CPU s", "MB read", "peak MB"),
    )
    for part in ("whole", "snapshot"):
        each = found[part]
        seconds = f"{each['read_s']:.2f}", f"{each['all_s']:.2f}", f"{each['cpu_s']:.2f}"
        table.rows.append((part, *seconds, f"{each['bytes'] / 1e6:,.0f}", f"{each['peak'] / 1e6:,.0f}"))
    taking, taken = found["write"]["taking_s"], found["write"]["snapshot_bytes"]
    writing = found["write"]["writing_s"]
    table.notes.append(
        f"a snapshot of {taken / 1e6:.1f} MB: {taking * 1000:.1f} ms of the engine's thread at most, and "
        f"{writing * 1000:.1f} ms of another one"
    )
    if size >= LOG_BYTES:
        met = "met" if found["snapshot"]["all_s"] <= BAR_S else "not met"
        table.notes.append(f"the bar for a log of {LOG_BYTES / 1e9:.0f} GB is {BAR_S:.0f} s: {met}")
    show((table,), machine_lines(1))


if __name__ == "__main__":
    main()
