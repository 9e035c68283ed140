"""A fault in vLLM 0.33.0 itself: two requests with an image wait forever.

    python -m examples.vllm_faults.chunk_livelock [LOG]

With `disable_chunked_mm_input`, a prefill chunk must not end inside an image. `long_prefill_token_threshold`
limits the chunk's length, but only if several requests are present. If an image is longer than the threshold,
no chunk covers the image, and nothing is scheduled. In vLLM 0.32.0 a chunk that starts at an image may split
the image, so both requests are served.
"""

from vllm.v1.core.sched.scheduler import Scheduler


def record():
    """Record random requests on vLLM's scheduler, and return the log's folder."""
    from examples.vllm_faults.recorded_run import new_log
    from examples.vllm_faults.served_script import random_images, serve

    log = new_log()
    limits = {"split_media": False, "token_budget": 64, "long_prefill_token_threshold": 24}
    serve(random_images(1, num_requests=12, **limits), Scheduler, log)
    return log


if __name__ == "__main__":
    from examples.vllm_faults.recorded_run import mmengine_log

    log = record()
    mmengine_log("verify", log)
