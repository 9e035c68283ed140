"""A fault in vLLM 0.33.0 itself: two requests with an image wait for each other for ever.

    python -m examples.vllm_faults.chunk_livelock [LOG]

With `disable_chunked_mm_input` a chunk that would end inside an image is cut before the image. While two
requests or more are present, `long_prefill_token_threshold` caps the chunk. If the image is longer than the
threshold, the capped chunk never covers the image, and nothing is scheduled. A single request has no cap, so
the hang needs two. vLLM 0.32.0 splits an image at which the chunk begins, and serves both requests.
"""

from vllm.v1.core.sched.scheduler import Scheduler


def record():
    """Record random requests on this class, and return the log's folder."""
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
