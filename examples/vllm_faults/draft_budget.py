"""A fault: drafts do not count against the budget of a step.

    python -m examples.vllm_faults.draft_budget [LOG]

vLLM schedules at most `max_num_batched_tokens` tokens a step, drafts included. With the fault, the drafts of
the running requests are added to the budget. A worker's buffers have the size of the budget, so an overrun
writes past their end.
"""

from vllm.v1.core.sched.scheduler import Scheduler


class LeavesOutDrafts(Scheduler):
    def schedule(self, *args, **more):
        drafts = sum(len(request.spec_token_ids) for request in self.running)
        limits = self.scheduler_config
        self.max_num_scheduled_tokens += drafts
        limits.max_num_batched_tokens += drafts
        try:
            return super().schedule(*args, **more)
        finally:
            self.max_num_scheduled_tokens -= drafts
            limits.max_num_batched_tokens -= drafts


def record():
    """Record random requests on this class, and return the log's folder."""
    # Imported here, so that a generated test can import the class without mmengine.
    from examples.vllm_faults.recorded_run import record_random_requests

    return record_random_requests(LeavesOutDrafts, 1, drafts=3)


if __name__ == "__main__":
    from examples.vllm_faults.recorded_run import mmengine_log

    log = record()
    mmengine_log("verify", log, "--invariants")
