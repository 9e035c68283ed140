"""Measures the CPU time per step of vLLM's scheduler and of mmengine_vllm.Scheduler, without a model.

    build/vllm/bin/python -m benchmarks.vllm.scheduler_cost [--steps 400] [--rows 16 256 1024] [--log FOLDER]

The program measures `schedule` and `update_from_output` in steps in which every row decodes a token.
mmengine's time includes the translation into vLLM's output objects. With --log, the time also includes the
event log. The floor is the time to create vLLM's output objects, which every Python scheduler must create.
"""

import argparse
import gc
import os
import random
import statistics
import time
from pathlib import Path

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler as TheirScheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

from benchmarks.vllm.turns import turns
from mmengine_vllm import Scheduler as OurScheduler
from mmengine_vllm.vllm_object import VllmObject
from tests.vllm.model_free import Runner, block_hasher, engine_config, make_request, make_scheduler

TURN = 20  # consecutive steps with a scheduler class, before the other class runs
PROMPT = 64


class Side:
    """A scheduler whose rows all decode."""

    def __init__(self, cls: type, config: VllmObject, rows: int, num_tokens: int):
        self.scheduler = make_scheduler(cls, config)
        self._runner, hasher = Runner(self.scheduler), block_hasher(config)
        draw = random.Random(7)
        for number in range(rows):
            prompt = [draw.randrange(32000) for _ in range(PROMPT)]
            self.scheduler.add_request(make_request(f"request-{number}", prompt, num_tokens, hasher))
        while True:
            output = self.scheduler.schedule()
            self.scheduler.update_from_output(output, self._runner.run(output))
            if output.total_num_scheduled_tokens == rows:
                break

    def step(self) -> int:
        """Run one step and return the scheduler's CPU time in ns."""
        begin = time.process_time_ns()
        output = self.scheduler.schedule()
        spent = time.process_time_ns() - begin
        result = self._runner.run(output)
        begin = time.process_time_ns()
        self.scheduler.update_from_output(output, result)
        return spent + time.process_time_ns() - begin


def floor(rows: int) -> int:
    """Return the CPU time in ns to create vLLM's output objects for a step."""
    names = [f"request-{number}" for number in range(rows)]
    begin = time.process_time_ns()
    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens = dict.fromkeys(names, 1)
    cached = output.scheduled_cached_reqs
    cached.req_ids, cached.new_block_ids = list(names), [None] * rows
    cached.num_computed_tokens, cached.num_output_tokens = list(range(rows)), list(range(rows))
    EngineCoreOutputs(outputs=[EngineCoreOutput(name, [7]) for name in names])
    return time.process_time_ns() - begin


def measure(rows: int, steps: int) -> None:
    config = engine_config(
        max_num_seqs=rows,
        max_num_batched_tokens=max(rows + 4096, 8192),
        num_blocks=rows * 40 + 100,
        max_model_len=max(1024, PROMPT + steps + 300),
        async_scheduling=False,
    )
    num_tokens = steps + 200
    sides = [Side(cls, config, rows, num_tokens) for cls in (TheirScheduler, OurScheduler)]
    gc.collect()
    pairs, floors = list[tuple[float, float]](), list[float]()
    for pair in turns(sides, steps, TURN):
        pairs.append(pair)
        floors.append(sum(floor(rows) for _ in range(TURN)) / TURN / 1e3)
    theirs, ours = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
    least, ratio = statistics.median(floors), statistics.median(pair[0] / pair[1] for pair in pairs)
    times = f"vLLM {theirs:8.0f} us, mmengine {ours:7.0f} us, floor {least:6.0f} us"
    print(f"{rows:5} rows: {times}: {ratio:.1f} times")
    for side in sides:
        side.scheduler.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 256, 1024])
    parser.add_argument("--log", type=Path, help="folder for mmengine's logs")
    args = parser.parse_args()
    for rows in args.rows:
        if args.log is not None:
            os.environ["MMENGINE_LOG"] = str(args.log / str(rows))
        measure(rows, args.steps)


if __name__ == "__main__":
    main()
