"""A fault: under the priority policy the newest request is preempted, whatever its priority.

    python -m examples.vllm_faults.priority_victim [LOG]

vLLM preempts the running request with the largest priority value (the worst priority). With the fault, vLLM
preempts the request that was admitted last, even if this request has the best priority.
"""

from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler


class PreemptsTheNewest(Scheduler):
    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.policy = SchedulingPolicy.FCFS  # the waiting queue already exists, and stays sorted by priority


def record():
    """Record a run of this scheduler with random requests, and return the log's folder."""
    # Imported here, so that a generated test can import the class without mmengine.
    from examples.vllm_faults.recorded_run import record_random_requests

    return record_random_requests(PreemptsTheNewest, 1, scheduling_policy="priority")


if __name__ == "__main__":
    from examples.vllm_faults.recorded_run import mmengine_log

    log = record()
    mmengine_log("verify", log)
