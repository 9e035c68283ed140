"""Selects an engine's scheduler by the setting `compat`: this engine's rules or vLLM's rules."""

import re

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
_VERSIONS = {(0, 32): "vllm-0.32", (0, 33): "vllm-0.33"}
_VERSION = re.compile(r"vllm (\d+)\.(\d+)")


def scheduler_of(config: EngineConfig) -> Scheduler:
    """Return the scheduler that the setting `compat` selects."""
    return _SCHEDULERS[config.compat]


def nearest_compat(host: str) -> tuple[str, bool]:
    """Return the setting `compat` for the supported vLLM version that is nearest to the version in `host`,
    and whether both versions are equal. `host`: an engine's name and version, such as "vllm 0.32.0". Returns
    "" and False if `host` is not vLLM.
    """
    found = _VERSION.match(host)
    if found is None:
        return "", False
    version = int(found[1]), int(found[2])
    nearest = min(_VERSIONS, key=lambda known: (abs(_place(known) - _place(version)), known))
    return _VERSIONS[nearest], nearest == version


def _place(version: tuple[int, int]) -> int:
    return 1000 * version[0] + version[1]
