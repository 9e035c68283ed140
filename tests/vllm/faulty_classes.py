"""Faulty scheduler classes of vLLM for tests. Requires vLLM."""

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from examples.vllm_faults.lost_rows import LosesRows


class LosesRowsAhead(LosesRows, AsyncScheduler):
    """Loses rows under asynchronous scheduling, which decides a step before the previous step's tokens are
    known.
    """
