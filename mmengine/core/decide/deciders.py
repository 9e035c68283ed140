"""Chooses an engine's scheduler: this engine's rules, or vLLM's."""

from mmengine.config import EngineConfig
from mmengine.core.decide.scheduler import SCHEDULER, Scheduler
from mmengine.core.decide.vllm.scheduler import VLLM_SCHEDULER


def scheduler_of(config: EngineConfig) -> Scheduler:
    """Return the scheduler that the setting `compat` asks for."""
    return VLLM_SCHEDULER if config.compat == "vllm" else SCHEDULER
