"""Measure how much CPU time recording adds to vLLM's scheduler, without a model. The benchmark times
`add_request`, `schedule` and `update_from_output` in vLLM's class and in the recording class.

    build/vllm/bin/python -m benchmarks.vllm.recorder_cost [--steps 2000] [--rows 256 1024]

Both classes get the same requests and tokens. The benchmark runs with Scheduler and with AsyncScheduler. When
a request ends, a new request takes its row. gc.freeze exempts existing objects from garbage collection, as in
vLLM's engine. "inside" is the CPU time that the recorder's own methods take in all threads. "inside" varies
less than the difference between the two classes. Ended requests are kept until the step has been timed.
Otherwise "inside" would include the time to free them.
"""

import argparse
import gc
import os
import random
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from benchmarks.vllm.turns import turns
from mmengine_vllm import RecordingScheduler
from mmengine_vllm.recording import Recording
from tests.vllm.model_free import Runner, block_hasher, engine_config, make_request, make_scheduler

TURN = 50  # consecutive steps of one class, before the other class runs


class Side:
    """A scheduler with its requests."""

    def __init__(self, cls: type, config: Any, rows: int, num_tokens: int):
        self.scheduler = make_scheduler(cls, config)
        self._runner, self._hasher = Runner(self.scheduler), block_hasher(config)
        self._random, self._rows, self._num_tokens, self._count = random.Random(7), rows, num_tokens, 0
        self._flying, self._overlaps = deque[tuple[Any, Any]](), config.scheduler_config.async_scheduling
        # Request id -> request: the scheduler's requests, and the requests that ended in the last step.
        self._alive: dict[str, Any] = {}

    def fill(self) -> list[Any]:
        """Return new requests that fill the free rows and keep 16 requests waiting."""
        missing = self._rows + 16 - len(self.scheduler.requests)
        new = []
        for _ in range(max(0, missing)):
            prompt = [self._random.randrange(32000) for _ in range(64)]
            length = self._random.randint(self._num_tokens // 2, self._num_tokens * 3 // 2)
            new.append(make_request(f"request-{self._count}", prompt, length, self._hasher))
            self._count += 1
        live = self.scheduler.requests
        self._alive = {name: each for name, each in self._alive.items() if name in live}
        self._alive.update((each.request_id, each) for each in new)
        return new

    def step(self) -> int:
        """Run one step and return the scheduler's CPU time in ns."""
        new = self.fill()
        begin = time.process_time_ns()
        for request in new:
            self.scheduler.add_request(request)
        output = self.scheduler.schedule()
        spent = time.process_time_ns() - begin
        self._flying.append((output, self._runner.run(output)))
        if len(self._flying) <= self._overlaps:
            return spent
        oldest = self._flying.popleft()
        begin = time.process_time_ns()
        self.scheduler.update_from_output(*oldest)
        return spent + time.process_time_ns() - begin


class Inside:
    """Adds up the CPU time of `Recording.call` and `Recording.flush`, less the time to read the clock."""

    def __init__(self) -> None:
        self.ns, now = 0, time.thread_time_ns
        clock = round(statistics.median(-(now() - now()) for _ in range(1000)))

        def timed(inner: Callable[..., None]) -> Callable[..., None]:
            def method(*args: Any, **kwargs: Any) -> None:
                begin = now()
                inner(*args, **kwargs)
                self.ns += now() - begin - clock

            return method

        Recording.call = timed(Recording.call)  # type: ignore[method-assign]
        Recording.flush = timed(Recording.flush)  # type: ignore[method-assign]


def measure(base: type, rows: int, steps: int, num_tokens: int, inside: Inside) -> None:
    config = engine_config(
        max_num_seqs=rows,
        max_num_batched_tokens=rows + 4096,
        num_blocks=rows * 16 + 1000,
        max_model_len=1024,
    )
    config.scheduler_config.async_scheduling = base is AsyncScheduler
    sides = [Side(cls, config, rows, num_tokens) for cls in (base, RecordingScheduler)]
    for side in sides:
        for _ in range(100):
            side.step()
    gc.collect()
    gc.freeze()
    inside.ns = 0
    pairs = list(turns(sides, steps, TURN))
    plain, recorded = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
    extra = statistics.median(pair[1] - pair[0] for pair in pairs)
    share = statistics.median((pair[1] - pair[0]) / pair[0] for pair in pairs)
    within = inside.ns / (len(pairs) * TURN) / 1e3
    times = f"{plain:7.0f} us plain, {recorded:7.0f} us recorded, difference {extra:5.0f} us: {share:6.1%}"
    inner = f"inside {within:5.0f} us: {within / plain:5.1%}"
    print(f"{base.__name__:>14}, {rows:5} rows: {times}; {inner} ({len(pairs)} turns)", flush=True)
    for side in sides:
        side.scheduler.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--tokens", type=int, default=256, help="tokens of an answer, on average")
    args = parser.parse_args()
    inside = Inside()
    for base in (Scheduler, AsyncScheduler):
        for rows in args.rows:
            with tempfile.TemporaryDirectory() as folder:
                os.environ["MMENGINE_LOG"] = f"{folder}/log"
                measure(base, rows, args.steps, args.tokens, inside)


if __name__ == "__main__":
    main()
