"""A fault: waiting requests are never admitted, though the KV cache is empty.

    python -m examples.vllm_faults.lost_rows [LOG]

With the fault, each abort of a waiting request lowers the scheduler's count of free rows. After
`max_num_seqs` such aborts, no row is left. vLLM's users reported servers with waiting requests, no running
request and an empty cache (#45414, #53130), but from a different cause.
"""

from vllm.v1.core.sched.scheduler import Scheduler


class LosesRows(Scheduler):
    num_lost = 0

    def finish_requests(self, *args, **more):
        running = {request.request_id for request in self.running}
        ended = super().finish_requests(*args, **more)
        self.num_lost += sum(request.request_id not in running for request in ended)
        return ended

    def schedule(self, *args, **more):
        limit = self.max_num_active_reqs
        self.max_num_active_reqs = max(0, limit - self.num_lost)
        try:
            return super().schedule(*args, **more)
        finally:
            self.max_num_active_reqs = limit


def record():
    """Record random requests with the scheduler LosesRows, and return the log's folder."""
    # Imported here, so that a generated test can import the class without mmengine.
    from examples.vllm_faults.recorded_run import record_random_requests

    return record_random_requests(LosesRows, 1, max_num_seqs=3)


if __name__ == "__main__":
    from examples.vllm_faults.recorded_run import mmengine_log

    log = record()
    mmengine_log("verify", log)
