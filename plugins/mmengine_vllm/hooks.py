"""Overrides the public methods of a scheduler class, so that a recording sees every call. Does not import
vLLM.
"""

from time import monotonic_ns
from typing import TYPE_CHECKING

from mmengine_vllm.recording import Recording, begin
from mmengine_vllm.vllm_object import VllmObject

if TYPE_CHECKING:
    Base = VllmObject  # stands for a scheduler, so that type checkers find the methods
else:
    Base = object


class RecordsCalls(Base):
    """A mixin that precedes a scheduler class in the list of base classes. Every method calls the scheduler's
    own method with the same arguments, and returns the same result. The recording changes neither arguments
    nor results.
    """

    host_version = "unknown"

    def __init__(self, *args: VllmObject, **kwargs: VllmObject):
        self._recording: Recording | None = None
        self._is_updating, self._ended_in_update = False, list[VllmObject]()
        super().__init__(*args, **kwargs)
        self._recording = begin(self, self.host_version)

    def add_request(self, *args: VllmObject, **kwargs: VllmObject) -> VllmObject:
        result = super().add_request(*args, **kwargs)
        if (recording := self._recording) is not None:
            recording.call(recording.recorder.added, args[0] if args else kwargs.get("request"))
        return result

    def finish_requests(self, *args: VllmObject, **kwargs: VllmObject) -> VllmObject:
        result = super().finish_requests(*args, **kwargs)
        if (recording := self._recording) is not None:
            if self._is_updating:
                self._ended_in_update += result or ()
            else:
                recording.call(recording.recorder.finished, result)
        return result

    def schedule(self, *args: VllmObject, **kwargs: VllmObject) -> VllmObject:
        recording = self._recording
        if recording is None:
            return super().schedule(*args, **kwargs)
        began = monotonic_ns()
        try:
            output = super().schedule(*args, **kwargs)
        except Exception as error:
            recording.failed("schedule", error)
            raise
        recording.call(recording.scheduled, output, self, began)
        return output

    def update_from_output(self, *args: VllmObject, **kwargs: VllmObject) -> VllmObject:
        recording = self._recording
        if recording is None:
            return super().update_from_output(*args, **kwargs)
        began = monotonic_ns()
        values = (*args, *kwargs.values())[:2]
        recording.call(recording.recorder.received, *values)
        self._is_updating = True
        try:
            result = super().update_from_output(*args, **kwargs)
        except Exception as error:
            recording.failed("update_from_output", error)
            raise
        finally:
            self._is_updating = False
        recording.call(recording.executed, *values, self, began)
        if self._ended_in_update:
            ended, self._ended_in_update = self._ended_in_update, []
            recording.call(recording.recorder.finished, ended)
        return result

    def update_draft_token_ids(self, *args: VllmObject, **kwargs: VllmObject) -> VllmObject:
        result = super().update_draft_token_ids(*args, **kwargs)
        if (recording := self._recording) is not None:
            drafts = args[0] if args else kwargs.get("draft_token_ids")
            recording.call(recording.recorder.drafted, drafts, self)
        return result

    def reset_prefix_cache(self, *args: VllmObject, **kwargs: VllmObject) -> VllmObject:
        running = list(getattr(self, "running", ()))
        result = super().reset_prefix_cache(*args, **kwargs)
        if (recording := self._recording) is not None and result:
            preempts = bool(args[0] if args else kwargs.get("reset_running_requests", False))
            recording.call(recording.recorder.reset, running, preempts=preempts)
        return result

    def reset_encoder_cache(self, *args: VllmObject, **kwargs: VllmObject) -> VllmObject:
        result = super().reset_encoder_cache(*args, **kwargs)
        if (recording := self._recording) is not None:
            recording.call(recording.recorder.forget_encoded)
        return result

    def set_pause_state(self, *args: VllmObject, **kwargs: VllmObject) -> VllmObject:
        result = super().set_pause_state(*args, **kwargs)
        if (recording := self._recording) is not None:
            state = args[0] if args else kwargs.get("pause_state")
            recording.call(recording.recorder.paused, state)
        return result

    def shutdown(self, *args: VllmObject, **kwargs: VllmObject) -> VllmObject:
        if self._recording is not None:
            self._recording.close()
        return super().shutdown(*args, **kwargs)
