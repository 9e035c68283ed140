"""Chooses an engine's scheduler: the scheduler with this engine's rules, or that with vLLM's rules."""

from mmengine.config import EngineConfig
from mmengine.core.decide.scheduler import SCHEDULER, Scheduler
from mmengine.core.decide.vllm.scheduler import VLLM_SCHEDULER


def scheduler_of(config: EngineConfig) -> Scheduler:
    """Return the scheduler for the setting `compat`."""
    return VLLM_SCHEDULER if config.compat == "vllm" else SCHEDULER
