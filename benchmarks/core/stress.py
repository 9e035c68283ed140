"""Runs 10,000 requests through a KV pool that is far too small for them.

    python -m benchmarks stress [--requests N]

Six runs preempt by recompute or by swap: plain, with drafts, and with two steps in flight. Every run writes a
log to disk. The simulated model's tokens depend on every KV slot that a request reads. Each answer is
compared with the request's answer when it runs alone, and the logs are verified. Exits with 1 when anything
differs.

    --traces DIR   also run every trace in this folder (.csv, .jsonl, maybe .gz): each request must finish,
                   and the log must verify
    --limit N      only the first N requests of each trace
    --out FILE.md  file for the tables
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from benchmarks.core.stress_requests import stress_requests
from mmengine.config import EngineConfig
from mmengine.core.engine import EngineCore
from mmengine.errors import MMEngineError
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader, LogWriter
from mmengine.replay import verify
from mmengine.request import Request
from mmengine.simulation import Driver, read_settings
from mmengine.simulation.simulated_executor import SimulatedExecutor, reference_tokens
from mmengine.simulation.workload_files import load_workload

EOS_IN = 40
# 32 rows with up to 256 tokens share 60 blocks with 16 tokens each.
PRESSED = EngineConfig(
    max_num_seqs=32,
    token_budget=256,
    max_model_len=256,
    num_blocks=61,
    long_prefill_token_threshold=48,
    encoder_budget=192,
    encoder_cache_size=768,
    policy="priority",
    admission_reserve="none",
    max_waiting=256,
)
RECOMPUTE = {"preempt_mode": "recompute"}
SWAP = {"preempt_mode": "swap", "swap_blocks": 512}
CASES = {
    "recompute": RECOMPUTE,
    "swap": SWAP,
    "recompute, drafts": {**RECOMPUTE, "num_draft_tokens": 3},
    "swap, drafts": {**SWAP, "num_draft_tokens": 3},
    "recompute, two in flight": {**RECOMPUTE, "max_in_flight": 2},
    "swap, two in flight": {**SWAP, "max_in_flight": 2},
}
STRESS_HEAD = (
    *("preemption by", "requests", "tokens", "steps", "preemptions", "swapped out", "blocks swapped"),
    *("wrong answers", "run CPU s", "log MB", "verify CPU s", "verified"),
)
TRACE_HEAD = (
    *("trace", "requests", "finished", "refused", "tokens", "steps", "preemptions"),
    *("run CPU s", "log MB", "verify CPU s", "verified"),
)


@dataclass(slots=True)
class Run:
    """A run's results. `answers`: request id -> (tokens, finish reason). `seconds`: CPU time."""

    answers: dict[str, tuple[list[int], str]] = field(default_factory=dict)
    seconds: float = 0.0
    steps: int = 0


def run_engine(config: EngineConfig, requests: Iterable[Request], log: Path) -> Run:
    """Run all requests to their end, and keep the waiting queue full."""
    executor = SimulatedExecutor(config, eos_in=EOS_IN, check_kv=True)
    core = EngineCore(config, executor, sink=LogWriter(log))
    run, tokens, waiting = Run(), {}, iter(requests)
    more = True
    begin = time.process_time()
    while more or core.has_work:
        while more and core.stats().num_waiting + len(core.inbox) < config.max_waiting:
            request = next(waiting, None)
            more = request is not None
            if more:
                core.submit(request)
                tokens[request.request_id] = []
        for output in core.step():
            tokens[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                run.answers[output.request_id] = tokens.pop(output.request_id), output.finish_reason
                core.delivered(output.request_id)
    core.close()
    run.seconds, run.steps = time.process_time() - begin, core.stats().steps
    assert not tokens, "a request has no end"
    return run


def stress_row(case: str, num_requests: int, seed: int, log: Path) -> tuple[list[object], Run, bool]:
    """Return one line of the table, the run, and whether all checks passed."""
    config = replace(PRESSED, **CASES[case])
    run = run_engine(config, stress_requests(num_requests, seed), log)
    wrong = num_requests - len(run.answers)
    for request in stress_requests(num_requests, seed):
        wrong += run.answers.get(request.request_id) != reference_tokens(request, config, eos_in=EOS_IN)
    counts = preemptions(log)
    size, seconds, verified = verified_log(log)
    row = [
        *(case, num_requests, sum(len(tokens) for tokens, _ in run.answers.values()), run.steps),
        *(counts["preempted"], counts["swapped"], counts["blocks"]),
        *(wrong, f"{run.seconds:.1f}", size, seconds, verified),
    ]
    return row, run, not wrong and verified == "yes"


def preemptions(log: Path) -> Counter:
    """Count a log's preemptions, the preemptions by swap, and the blocks swapped out."""
    counts = Counter()
    for record in LogReader(log):
        if isinstance(record.event, ev.Preempted):
            counts["preempted"] += 1
            counts["swapped"] += record.event.mode == "swap"
            counts["blocks"] += len(record.event.host_blocks) // 4
    return counts


def verified_log(log: Path) -> tuple[str, str, str]:
    """Verify a log. Return the log's size in MB, the CPU seconds for verifying, and "yes" or "no: REASON".

    An unfinished request is a failure.
    """
    begin = time.process_time()
    report = verify(log)
    seconds = time.process_time() - begin
    whole = report.ok and report.rederived and not report.unfinished and report.torn is None
    size = sum(path.stat().st_size for path in log.iterdir()) / 1e6
    return f"{size:.1f}", f"{seconds:.1f}", "yes" if whole else f"no: {report.divergence or 'unfinished'}"


def trace_row(path: Path, limit: int | None, log: Path) -> tuple[list[object], bool]:
    workload = load_workload(path, "auto", limit)
    sink = LogWriter(log)
    begin = time.process_time()
    report = Driver(workload, read_settings({}, workload), log=sink).run()
    run_s = time.process_time() - begin
    sink.close()
    finished = sum(report.meter.ends.get(reason, 0) for reason in ("stop", "length"))
    size, seconds, verified = verified_log(log)
    row = [
        *(path.name, len(workload.requests), finished, report.num_refused, report.meter.num_output_tokens),
        *(report.num_steps, report.meter.num_preemptions, f"{run_s:.1f}", size, seconds, verified),
    ]
    return row, finished == len(workload.requests) and verified == "yes"


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    lines += [" | ".join(str(cell) for cell in row) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--traces", type=Path)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    holds, rows, runs, parts = True, [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            row, run, sound = stress_row(case, options.requests, options.seed, Path(folder) / case)
            rows.append(row)
            runs.append(run)
            holds = holds and sound
        equal = all(run.answers == runs[0].answers for run in runs)
        verdict = "equal" if equal else "NOT equal"
        parts.append(table(STRESS_HEAD, rows) + f"\n\nAnswers of all runs, token by token: {verdict}.")
        holds = holds and equal
        if options.traces is not None:
            paths = sorted(
                path for path in options.traces.iterdir() if {".csv", ".jsonl"} & set(path.suffixes)
            )
            rows = []
            for path in paths:
                row, sound = trace_row(path, options.limit, Path(folder) / path.name)
                rows.append(row)
                holds = holds and sound
            parts.append("## Traces\n\n" + table(TRACE_HEAD, rows))
    text = "\n\n".join(["# A pool too small for its requests", *parts]) + "\n"
    print(text, end="")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text)
    return 0 if holds else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MMEngineError as error:
        sys.exit(f"stress: {error}")
