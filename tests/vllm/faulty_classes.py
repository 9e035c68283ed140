"""Faulty scheduler classes of vLLM for tests. Requires vLLM."""

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from examples.vllm_faults.lost_rows import LosesRows


class LosesRowsAhead(LosesRows, AsyncScheduler):
    """Loses rows while each step is decided before the last step's tokens are back."""
