"""A fault: the blocks of an aborted request are freed twice.

    python -m examples.vllm_faults.double_free [LOG]

Each request that shares a prefix block holds a reference to the block. The second `free` drops another
running request's reference. The block then counts as free, and a third request overwrites the block.
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
    # Imported here, so that a generated test can import the class without mmengine.
    from examples.vllm_faults.recorded_run import record_random_requests

    return record_random_requests(FreesTwice, 1)


if __name__ == "__main__":
    from examples.vllm_faults.recorded_run import mmengine_log

    log = record()
    mmengine_log("verify", log, "--invariants")
    mmengine_log("verify", log)
