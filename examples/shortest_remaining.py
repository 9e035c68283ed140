"""A custom policy: run the request with the fewest remaining tokens, preempt the one with the most.

    python examples/shortest_remaining.py

Runs one workload in the simulator under two policies and prints the mean time to the last token.
"""

import random

import numpy as np

from mmengine import EngineConfig, SamplingParams
from mmengine.core.engine import EngineCore
from mmengine.core.state.policy import Policy, register_policy
from mmengine.core.state.request_state import RequestState
from mmengine.request import Request
from mmengine.simulation.simulated_executor import SimulatedExecutor


def remaining(req_state: RequestState) -> int:
    return req_state.num_prompt + req_state.request.sampling.max_tokens - len(req_state.tokens)


def rank(req_state: RequestState) -> tuple[int, ...]:
    return (remaining(req_state), req_state.arrival)


def victim(view) -> int:
    return max(view.running.tolist(), key=lambda row: rank(view.requests_by_row[row]))


policy = Policy(rank, victim)


def mean_end_ms(name: str) -> float:
    """Return the mean end time of 200 simultaneous requests with 8 rows, in simulated milliseconds."""
    rng = random.Random(7)
    sizes = {"max_model_len": 512, "num_blocks": 300, "encoder_cache_size": 1024}
    config = EngineConfig(max_num_seqs=8, token_budget=256, policy=name, **sizes)
    executor = SimulatedExecutor(config)
    core = EngineCore(config, executor)
    for number in range(200):
        prompt = np.full(rng.randint(8, 64), number, np.int32)
        core.submit(Request(f"r{number}", prompt, SamplingParams(max_tokens=rng.randint(4, 200), seed=0)))
    ends = []
    while core.has_work:
        ends += [executor.clock_ns for output in core.step() if output.finish_reason]
    return sum(ends) / len(ends) / 1e6


if __name__ == "__main__":
    register_policy("shortest_remaining", policy)
    for name in ("fcfs", "shortest_remaining"):
        print(f"{name:>20}: {mean_end_ms(name):8.1f} ms from arrival to the last token, mean of 200 requests")
