"""Selects an engine's scheduler by the setting `compat`: this engine's rules or vLLM's rules."""

from mmengine.config import EngineConfig
from mmengine.core.decide.scheduler import SCHEDULER, Scheduler
from mmengine.core.decide.vllm.scheduler import VLLM_SCHEDULER
from mmengine.core.decide.vllm.versions import VLLM_032_SCHEDULER, VLLM_033_SCHEDULER

_SCHEDULERS = {
    "": SCHEDULER,
    "vllm": VLLM_SCHEDULER,
    "vllm-0.32": VLLM_032_SCHEDULER,
    "vllm-0.33": VLLM_033_SCHEDULER,
}


def scheduler_of(config: EngineConfig) -> Scheduler:
    """Return the scheduler that the setting `compat` selects."""
    return _SCHEDULERS[config.compat]
