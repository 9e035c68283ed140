"""Measures vLLM's CPU throughput in float32, with vLLM's own scheduler and with mmengine_vllm.Scheduler.

    build/vllm/bin/python -m benchmarks.vllm.end_to_end [--requests 48] [--rounds 5]

Both engines run alternately in this process. Each engine gets all prompts at once: texts and images, without
grammars. The printed rates, in tokens per second and per CPU second, are medians over the rounds. The program
also compares both engines' answers.
"""

import argparse
import os
import statistics
import tempfile
import time

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    **dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK"), "1"),
}

from vllm import LLM

from benchmarks.vllm.mixed_requests import CHECKPOINT, prompt_of, workload
from mmengine_vllm.vllm_object import VllmObject

SIDES = {"vLLM": "vllm.v1.core.sched.scheduler.Scheduler", "mmengine": "mmengine_vllm.Scheduler"}


class Side:
    """One engine and its measurements."""

    def __init__(self, scheduler: str, rows: int):
        self.llm = LLM(
            model=str(CHECKPOINT),
            dtype="float32",
            max_model_len=480,
            enforce_eager=True,
            max_num_seqs=rows,
            block_size=32,
            max_num_batched_tokens=1024,
            kv_cache_memory_bytes=256 << 20,
            enable_prefix_caching=False,
            seed=0,
            scheduler_cls=scheduler,
        )
        self.wall, self.cpu, self.answers = list[float](), list[float](), list[list[int]]()

    def close(self) -> None:
        """End the engine. Call this before the folder of mmengine's log is deleted."""
        self.llm.llm_engine.engine_core.shutdown()

    def run(self, prompts: list[VllmObject], params: list[VllmObject]) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        self.answers = [list(output.outputs[0].token_ids) for output in outputs]
        tokens = sum(map(len, self.answers))
        self.wall.append(tokens / wall)
        self.cpu.append(tokens / cpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=32)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MMENGINE_LOG"] = f"{folder}/log"
        sides = {name: Side(scheduler, args.rows) for name, scheduler in SIDES.items()}
        requests = workload(args.requests, short=True)
        tokenizer = sides["vLLM"].llm.get_tokenizer()
        prompts = [prompt_of(asked, tokenizer) for asked in requests]
        params = [asked.params for asked in requests]
        for number in range(args.rounds + 1):
            for side in sorted(sides.values(), key=id, reverse=number % 2 == 1):
                side.run(prompts, params)
        theirs, ours = sides["vLLM"], sides["mmengine"]
        equal = sum(map(list.__eq__, theirs.answers, ours.answers))
        print(f"{args.requests} requests, {args.rows} rows, {args.rounds} rounds; {equal} answers equal")
        for name, side in sides.items():
            wall, cpu = statistics.median(side.wall[1:]), statistics.median(side.cpu[1:])
            print(f"{name:>9}: {wall:6.0f} tokens a second, {cpu:6.0f} tokens a CPU second", flush=True)
        pairs = zip(ours.cpu[1:], theirs.cpu[1:], strict=True)
        print(f"    ratio: {statistics.median(one / other for one, other in pairs):.2f} (CPU)")
        for side in sides.values():
            side.close()


if __name__ == "__main__":
    main()
