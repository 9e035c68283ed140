"""A fault: a preempted request keeps its references to encoder outputs (vLLM's #31857).

    python -m examples.vllm_faults.encoder_reference [LOG]

An encoder output can be evicted once no request references the output. With the fault, a preempted request
keeps its references. If prefix hits cover the image when the request resumes, the references are never
released. The output then stays in the encoder cache for ever, and later images do not fit.
"""

from vllm.v1.core.sched.scheduler import Scheduler


class KeepsReferences(Scheduler):
    def _preempt_request(self, request, *args, **more):
        self.encoder_cache_manager.request_cached_ids.pop(request.request_id, None)
        super()._preempt_request(request, *args, **more)


def record():
    """Record random requests with the faulty scheduler, and return the log's folder."""
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
