"""A fault: under the priority policy the newest request is preempted, whatever its priority.

    python -m examples.vllm_faults.priority_victim [LOG]

vLLM preempts the running request with the largest priority value, and among equal values the newest request.
With the fault it preempts the request that was admitted last, as under the policy "fcfs". The waiting queue
is still sorted by priority. So a request with the best priority that was admitted last loses its blocks to a
request with a worse priority.
"""

from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler


class PreemptsTheNewest(Scheduler):
    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.policy = SchedulingPolicy.FCFS  # the queue already exists, for the configured policy


def record():
    """Record random requests on this class, and return the log's folder."""
    # Imported here, so that a generated test can import the class without mmengine.
    from examples.vllm_faults.recorded_run import record_random_requests

    return record_random_requests(PreemptsTheNewest, 1, scheduling_policy="priority")


if __name__ == "__main__":
    from examples.vllm_faults.recorded_run import mmengine_log

    log = record()
    mmengine_log("verify", log)
