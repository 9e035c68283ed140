"""Measures the event log's cost, and compares it with SQLite for the same records.

    python -m benchmarks log [--quick] [--json]

    append    time to append and commit one decode step of 256 rows, back to back and once every 5 ms
    size      bytes per generated token, when all rows decode
    scan      records read per second, with checks of framing and checksums (as in a recovery)
    read      records read per second, with all events decoded
    verify    decode steps and tokens that `mmengine log verify` checks per second

Appends are measured in wall time, while a background thread syncs the log as in the engine. scan and verify
use one thread and are measured in CPU time. SQLite stores one row per record in WAL mode, with one
transaction per step and synchronous=NORMAL. If the process is killed, neither SQLite nor the log loses a
record. After a power cut, both lose at most the last records.
"""

import argparse
import gc
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.common.report import Table, machine_lines, markdown, show, target_line
from benchmarks.core.step_cost_engine import Bench, percentile
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader, LogWriter
from mmengine.events.recovery import Recovery, Walk
from mmengine.events.segment import open_segment
from mmengine.replay import verify
from mmengine.serve.requests.log_sync import LogSyncer

PACE_S = 0.005
BLOCK = 16


def decode_step(rows: int, number: int) -> list[ev.Event]:
    """Return the events that a step commits when all rows decode. One row in sixteen needs a new block."""
    tokens = (np.arange(rows, dtype=np.int32) * 7919 + number) % 151_936
    blocks = np.arange(rows // BLOCK, dtype=np.int32) + number
    return [ev.Executed(tokens.tobytes(), device_ns=12_345_678), ev.Scheduled(None, None, blocks.tobytes())]


class SqliteLog:
    """Writes the same records to an SQLite table."""

    def __init__(self, path: Path):
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.execute(
            "CREATE TABLE log "
            "(sequence INTEGER PRIMARY KEY, step INTEGER, mono_ns INTEGER, type INTEGER, body BLOB)"
        )
        self._pending: list[tuple] = []
        self._sequence = 0

    def append(self, event: ev.Event, step: int, mono_ns: int) -> None:
        body = msgspec.msgpack.encode(event)
        self._pending.append((self._sequence, step, mono_ns, ev.NUMBERS[type(event)], body))
        self._sequence += 1

    def commit(self) -> None:
        self._db.execute("BEGIN")
        self._db.executemany("INSERT INTO log VALUES (?, ?, ?, ?, ?)", self._pending)
        self._db.execute("COMMIT")
        self._pending.clear()

    def __iter__(self) -> Iterator[tuple]:
        return iter(self._db.execute("SELECT sequence, step, mono_ns, type, body FROM log ORDER BY sequence"))

    def close(self) -> None:
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._db.close()


def append_times(
    sink: Any, steps: list[list[ev.Event]], pace_s: float, after: Callable[[], None]
) -> list[int]:
    """Return each step's wall time in ns for appending and committing. `after` is called after each step."""
    times, next_at = [], time.perf_counter()
    for number, events in enumerate(steps):
        begin = time.perf_counter_ns()
        for event in events:
            sink.append(event, number, begin)
        sink.commit()
        times.append(time.perf_counter_ns() - begin)
        after()
        if pace_s:
            next_at += pace_s
            time.sleep(max(0.0, next_at - time.perf_counter()))
    return times


def measure_append(folder: Path, table: Table, targets: dict, *, count: int, paced: int) -> None:
    for name, pace_s, number in (("back to back", 0.0, count), ("one every 5 ms", PACE_S, paced)):
        steps = [decode_step(256, number) for number in range(number)]
        writer = LogWriter(folder / f"log {name}")
        syncer = LogSyncer(writer.sync, writer.tidy)
        ours = append_times(writer, steps, pace_s, syncer.notify)
        syncer.close()
        writer.close()
        database = SqliteLog(folder / f"{name}.sqlite")
        theirs = append_times(database, steps, pace_s, lambda: None)
        database.close()
        for who, times in (("mmengine", ours), ("SQLite WAL", theirs)):
            cells = [f"{percentile(times, share) / 1000:.1f}" for share in (50, 99)]
            table.rows.append((f"{who}, {name}", *cells, f"{max(times) / 1000:.0f}"))
        if pace_s:
            targets["append p99 paced at 5 ms, µs"] = at_most(percentile(ours, 99) / 1000, 250)
        else:
            targets["append p50 back to back, µs"] = at_most(percentile(ours, 50) / 1000, 10)


def steady_log(folder: Path, rows: int, count: int, max_in_flight: int) -> float:
    """Write a log with `count` steps below `folder`. All rows decode in each step. Return the log's bytes per
    token.
    """
    length = 4 * BLOCK + count + 64
    bench = Bench(
        folder,
        max_num_seqs=rows,
        token_budget=max(rows * 33, 2048),
        max_model_len=length,
        num_blocks=rows * (-(-length // BLOCK) + 1) + 64,
        max_in_flight=max_in_flight,
    )
    for number in range(rows):
        bench.ask(BLOCK + number % BLOCK)
    while len(bench.core.state.running) < rows:
        bench.step()
    before, tokens = bench.core.sink.num_bytes, bench.core.stats().num_output_tokens
    for _ in range(count):
        bench.step()
    size = (bench.core.sink.num_bytes - before) / (bench.core.stats().num_output_tokens - tokens)
    bench.close()
    return size


def rate(work: Callable[[], int], rounds: int = 3) -> float:
    """Return the best round's rate, in units per second of CPU time. `work` returns its number of units."""
    best = 0.0
    for _ in range(rounds):
        gc.collect()
        begin = time.thread_time()
        count = work()
        best = max(best, count / (time.thread_time() - begin))
    return best


def scan(folder: Path) -> int:
    recovery = Recovery("tail")
    for path in LogReader(folder).paths:
        with open_segment(path) as data:
            for _ in Walk(path, data, recovery, is_last=True):
                pass
    return recovery.next_sequence


def measure_steady(folder: Path, table: Table, targets: dict, *, rows: int, count: int) -> None:
    logs = {}
    for in_flight in (1, 2):
        at = folder / f"steady-{rows}-{in_flight}"
        size = steady_log(at, rows, count, in_flight)
        (log,) = at.iterdir()
        logs[in_flight] = log
        report = verify(log)
        if not report.ok:
            raise SystemExit(f"the log in {log} does not verify, so the figures are invalid")
        steps = rate(lambda log=log: verify(log).steps)
        table.rows.append(
            (
                f"{rows} rows, {in_flight} in flight",
                f"{size:.2f}",
                f"{rate(lambda log=log: scan(log)):,.0f}",
                f"{rate(lambda log=log: sum(1 for _ in LogReader(log))):,.0f}",
                f"{steps:,.0f}",
                f"{steps * report.tokens / report.steps:,.0f}",
            )
        )
        if in_flight == 1:
            targets[f"bytes a token at {rows} rows"] = at_most(size, 6 if rows == 256 else 12)
            if rows == 16:
                targets["verify at 16 rows, steps/s"] = at_least(steps, 10_000)
            else:
                targets["verify at 256 rows, tokens/s"] = at_least(steps * report.tokens / report.steps, 1e6)
    targets[f"scan at {rows} rows, records/s"] = at_least(rate(lambda: scan(logs[1])), 250_000)
    table.rows.append(sqlite_row(folder, logs[1], rows))


def sqlite_row(folder: Path, log: Path, rows: int) -> tuple[str, ...]:
    """Write the log's records to SQLite, and return a table row with the size and the read rates."""
    path = folder / f"steady-{rows}.sqlite"
    database, tokens = SqliteLog(path), 0
    for record in LogReader(log):
        database.append(record.event, record.step, record.mono_ns)
        if isinstance(record.event, ev.Executed):
            tokens += len(record.event.token_ids) // 4
            database.commit()
    database.commit()
    decoders = {number: msgspec.msgpack.Decoder(cls) for number, cls in ev.TYPES.items()}
    bare = rate(lambda: sum(1 for _ in database))
    made = rate(lambda: sum(decoders[number].decode(body) is not None for *_, number, body in database))
    database.close()
    size = path.stat().st_size / tokens
    return (f"{rows} rows, SQLite", f"{size:.2f}", f"{bare:,.0f}", f"{made:,.0f}", "", "")


def at_most(measured: float, bar: float) -> dict[str, float | bool]:
    return {"measured": round(measured, 2), "bar": bar, "met": bool(measured <= bar)}


def at_least(measured: float, bar: float) -> dict[str, float | bool]:
    return {"measured": round(measured), "bar": bar, "met": bool(measured >= bar)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the event log's cost beside SQLite.")
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--json", action="store_true", help="print the targets as a last line of JSON")
    parser.add_argument("--out", type=Path, help="Markdown file for the tables")
    args = parser.parse_args()
    targets: dict[str, dict[str, float | bool]] = {}
    append = Table("Appending a decode step of 256 rows, µs of wall time", ("", "p50", "p99", "worst"))
    steady = Table(
        "Steady decode",
        ("", "bytes a token", "scan, records/s", "read, records/s", "verify, steps/s", "verify, tokens/s"),
    )
    steady.notes.append("scan: framing and checksums (SQLite: raw rows); read: with every event decoded.")
    quick = args.quick
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        measure_append(folder, append, targets, count=500 if quick else 20_000, paced=50 if quick else 2000)
        for rows, count in ((16, 4000), (256, 1500)):
            measure_steady(folder, steady, targets, rows=rows, count=count // 20 if quick else count)
    goals = Table("Targets", ("", "measured", "bar", "met"))
    for what, each in targets.items():
        goals.rows.append(
            (what, f"{each['measured']:,}", f"{each['bar']:,.0f}", "yes" if each["met"] else "no")
        )
    lines, tables = machine_lines(1), (append, steady, goals)
    show(tables, lines)
    if args.out:
        args.out.write_text(markdown("Cost of the event log", tables, lines))
    if args.json:
        print(target_line(targets))


if __name__ == "__main__":
    main()
