"""Compares the answers of plain vLLM with those of vLLM under mmengine_vllm.Scheduler, on the CPU in float32.

    build/vllm/bin/python -m benchmarks.vllm.equal_tokens [--requests 200] [--settings plain "n-gram drafts"]

Each scheduler gets the same requests (mixed_requests.py). The KV pool is too small for all requests, so some
are preempted. Aborted answers are not compared. The table lists vLLM's error for a setting that vLLM cannot
run. The exit code is 1 if an answer differs, or if a log does not verify.
"""

import argparse
import os
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    **dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK"), "1"),
}

from vllm import LLM
from vllm.v1.core.sched.scheduler import Scheduler

from benchmarks.vllm.mixed_requests import (
    CHECKPOINT,
    DRAFT_HEAD,
    LORA_RANK,
    NUM_LORAS,
    make_adapters,
    prompt_of,
    workload,
)
from mmengine.replay import verify
from mmengine_vllm.vllm_object import VllmObject

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
EAGLE = {"method": "eagle3", "model": str(DRAFT_HEAD), "num_speculative_tokens": 3}
LORA = {"enable_lora": True, "max_loras": NUM_LORAS - 1, "max_lora_rank": LORA_RANK}
PRIORITY = {"scheduling_policy": "priority"}
RULES, SOME_LORA = "vLLM's rules", "LoRA for some"
# Adapter numbers for each setting's requests; 0: no adapter. In a batch with adapters, vLLM's CPU build
# applies the last adapter slot to requests without an adapter. SOME_LORA therefore has an additional slot
# that stays empty.
ADAPTERS = {"LoRA": range(1, NUM_LORAS + 1), SOME_LORA: range(NUM_LORAS + 1)}
SETTINGS: dict[str, dict[str, VllmObject]] = {
    "plain": {},
    "no prefix cache": {"enable_prefix_caching": False},
    "priority": PRIORITY,
    "n-gram drafts": {"speculative_config": NGRAM},
    RULES: {},
    f"{RULES}, priority": PRIORITY,
    f"{RULES}, n-gram drafts": {"speculative_config": NGRAM},
    "videos": {},
    "LoRA": LORA,
    SOME_LORA: {**LORA, "max_loras": NUM_LORAS + 1},
    "EAGLE drafts": {"speculative_config": EAGLE},
    "asynchronous": {"async_scheduling": True},
}
COLUMNS = ("setting", "answers", "equal", "preempted by vLLM", "by mmengine", "steps", "CPU s", "log")
FORMAT = "{:<24}{:>9}{:>8}{:>19}{:>13}{:>12}{:>14}  {}"


class Counting(Scheduler):
    """vLLM's own scheduler with a counter for preemptions."""

    num_preempted = 0

    def schedule(self, *args: VllmObject, **kwargs: VllmObject) -> VllmObject:
        output = super().schedule(*args, **kwargs)
        self.num_preempted += len(output.preempted_req_ids or ())
        return output


class Side(NamedTuple):
    """A scheduler's answers and counters. `answers`: (request id, answer's index) -> tokens, finish reason,
    stop reason, and number of logprobs.
    """

    answers: dict[tuple[str, int], tuple[VllmObject, ...]]
    preempted: int
    steps: int
    cpu_s: float


def run(setting: str, scheduler: str, number: int, folder: Path) -> Side:
    """Run the workload and return the answers."""
    llm = LLM(
        model=str(CHECKPOINT),
        dtype="float32",
        max_model_len=480,
        enforce_eager=True,
        max_num_seqs=8,
        block_size=32,
        max_num_batched_tokens=96,
        kv_cache_memory_bytes=64 << 20,
        num_gpu_blocks_override=24,
        seed=0,
        scheduler_cls=scheduler,
        **SETTINGS[setting],
    )
    engine, tokenizer = llm.llm_engine, llm.get_tokenizer()
    core = engine.engine_core.engine_core.scheduler
    if SETTINGS[setting].get("async_scheduling") and not core.vllm_config.scheduler_config.async_scheduling:
        raise NotImplementedError("vLLM turned asynchronous scheduling off")
    # vLLM's CPU build fails if a request has top_k and drafts. Only requests with two answers have top_k, so
    # settings with drafts get no such requests.
    several = "speculative_config" not in SETTINGS[setting]
    loras = ADAPTERS.get(setting, ())
    requests = workload(number, videos=setting == "videos", loras=loras, several=several)
    adapters = [None, *(make_adapters(folder) if loras else ())]
    todo, answers, step = list(enumerate(requests)), dict[tuple[str, int], tuple[VllmObject, ...]](), 0
    begin = time.process_time()
    while todo or engine.has_unfinished_requests():
        while todo and todo[0][1].step <= step:
            index, asked = todo.pop(0)
            priority = asked.priority if "scheduling_policy" in SETTINGS[setting] else 0
            more = {"lora_request": adapters[asked.lora], "priority": priority}
            engine.add_request(f"r{index}", prompt_of(asked, tokenizer), asked.params, **more)
        if step % 40 == 30:
            engine.abort_request([f"r{step // 3}"])
        for output in engine.step():
            for answer in output.outputs:
                if answer.finish_reason not in (None, "abort"):
                    ends = answer.finish_reason, answer.stop_reason, len(answer.logprobs or ())
                    answers[output.request_id, answer.index] = (tuple(answer.token_ids), *ends)
        step += 1
    cpu_s = time.process_time() - begin
    preempted = core.num_preempted if isinstance(core, Counting) else core.core.stats().num_preemptions
    core.shutdown()
    engine.engine_core.shutdown()
    return Side(answers, preempted, step, cpu_s)


def run_apart(setting: str, scheduler: str, number: int, folder: Path) -> Side | str:
    """Run the workload in a new process, and return the answers or the error. A second engine in the same
    process would fail, because numba is already imported.
    """
    folder.mkdir()
    out = folder / "side"
    command = [sys.executable, "-m", "benchmarks.vllm.equal_tokens", "--settings", setting]
    command += ["--requests", str(number), "--scheduler", scheduler, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    if out.exists():
        return pickle.loads(out.read_bytes())
    return f"the process ended with {done.returncode}: {done.stderr[-200:]}"


def run_here(setting: str, scheduler: str, number: int, out: Path) -> None:
    """Run the workload, and write the answers or the error to `out`."""
    try:
        side: Side | str = run(setting, scheduler, number, out.parent)
    except Exception as error:
        side = f"{type(error).__name__}: {error}"
    out.write_bytes(pickle.dumps(side))


def compare(setting: str, number: int, folder: Path) -> bool:
    """Run the workload with each scheduler and print a line. Return whether all answers are equal and the log
    verifies.
    """
    os.environ["MMENGINE_LOG"] = str(folder / "log")
    os.environ["MMENGINE_COMPAT"] = "vllm" if setting.startswith(RULES) else ""
    sides = []
    for name in ("benchmarks.vllm.equal_tokens.Counting", "mmengine_vllm.Scheduler"):
        side = run_apart(setting, name, number, folder / name)
        if isinstance(side, str):
            by = "mmengine" if sides else "vLLM itself"
            print(f"{setting:<24}not run by {by}: {side.splitlines()[0][:200]}", flush=True)
            return not sides
        sides.append(side)
    theirs, ours = sides
    common = theirs.answers.keys() & ours.answers.keys()  # other answers were aborted
    equal = sum(theirs.answers[key] == ours.answers[key] for key in common)
    report = verify(folder / "log", invariants=True)
    verdict = "verifies" if report.divergence is None else f"DIVERGED: {report.divergence}"
    steps, cpu_s = f"{theirs.steps}, {ours.steps}", f"{theirs.cpu_s:.1f}, {ours.cpu_s:.1f}"
    row = setting, len(common), equal, theirs.preempted, ours.preempted, steps, cpu_s, verdict
    print(FORMAT.format(*row), flush=True)
    return equal == len(common) > 0 and report.divergence is None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--scheduler", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.out:
        run_here(args.settings[0], args.scheduler, args.requests, args.out)
        return
    print(FORMAT.format(*COLUMNS), flush=True)
    is_equal = True
    for setting in args.settings:
        with tempfile.TemporaryDirectory() as folder:
            is_equal &= compare(setting, args.requests, Path(folder))
    sys.exit(not is_equal)


if __name__ == "__main__":
    sys.modules.setdefault("benchmarks.vllm.equal_tokens", sys.modules["__main__"])
    main()
