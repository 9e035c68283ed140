"""vLLM scheduler classes with planted bugs, for tests. Requires vLLM."""

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from examples.vllm_faults.lost_rows import LosesRows


class LosesRowsAhead(LosesRows, AsyncScheduler):
    """Loses rows, with asynchronous scheduling."""
