"""A fault: the blocks of an aborted request are freed twice.

    python -m examples.vllm_faults.double_free [LOG]

A prefix block has a reference of each request that shares it. The second `free` takes the reference of
another running request, so the block counts as free and is given to a third request, which overwrites it.
"""

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus


class FreesTwice(Scheduler):
    def _free_request_blocks(self, request):
        blocks = self.kv_cache_manager.get_blocks(request.request_id).blocks[0]
        super()._free_request_blocks(request)
        if request.status == RequestStatus.FINISHED_ABORTED:
            self.kv_cache_manager.block_pool.free_blocks([block for block in blocks if block.ref_cnt > 0])


def record():
    """Record random requests on this class, and return the log's folder."""
    # Lazy, so that a written test can import the class without mmengine.
    from examples.vllm_faults.recorded_run import record_random_requests

    return record_random_requests(FreesTwice, 1)


if __name__ == "__main__":
    from examples.vllm_faults.recorded_run import mmengine_log

    log = record()
    mmengine_log("verify", log, "--invariants")
    mmengine_log("verify", log)
