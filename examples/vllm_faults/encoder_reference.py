"""A fault: a preempted request keeps its references to encoder outputs (vLLM's #31857).

    python -m examples.vllm_faults.encoder_reference [LOG]

An encoder output is evicted only if no request has a reference to it. With the fault, preemption forgets
which outputs the request has, and leaves the references. A resumed request whose prefix hits cover the image
never looks the output up again, so the output stays in the cache for ever, and later images have no room.
"""

from vllm.v1.core.sched.scheduler import Scheduler


class KeepsReferences(Scheduler):
    def _preempt_request(self, request, *args, **more):
        self.encoder_cache_manager.request_cached_ids.pop(request.request_id, None)
        super()._preempt_request(request, *args, **more)


def record():
    """Record random requests on this class, and return the log's folder."""
    # Imported here, so that a generated test can import the class without mmengine.
    from examples.vllm_faults.recorded_run import new_log
    from examples.vllm_faults.served_script import random_images, serve

    log = new_log()
    serve(random_images(2), KeepsReferences, log)
    return log


if __name__ == "__main__":
    from examples.vllm_faults.recorded_run import mmengine_log

    log = record()
    mmengine_log("verify", log)
