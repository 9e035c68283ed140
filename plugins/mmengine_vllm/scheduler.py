"""The scheduler classes for vLLM's option `--scheduler-cls` that record decisions. Imports vLLM."""

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.version import __version__

from mmengine_vllm.hooks import RecordsCalls
from mmengine_vllm.vllm_object import VllmObject


class _SynchronousRecording(RecordsCalls, Scheduler):
    host_version = __version__


class RecordingScheduler(RecordsCalls, AsyncScheduler):
    """vLLM's own scheduler, which also writes a log. The scheduler is asynchronous if vLLM's configuration
    says so.
    """

    host_version = __version__

    def __new__(cls, vllm_config: VllmObject, *args: VllmObject, **kwargs: VllmObject) -> VllmObject:
        if cls is RecordingScheduler and not vllm_config.scheduler_config.async_scheduling:
            return _SynchronousRecording(vllm_config, *args, **kwargs)
        return super().__new__(cls)
