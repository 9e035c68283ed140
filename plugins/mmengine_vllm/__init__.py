"""mmengine's event log for vLLM: records what vLLM's scheduler decides, or decides in its place. A
distribution of its own for vLLM's environment.

    MMENGINE_LOG=run.log vllm serve MODEL --scheduler-cls mmengine_vllm.RecordingScheduler

The log is an ordinary mmengine log, so `mmengine log` works on it without vLLM and without a GPU. STARTED
names the host ("vllm 0.32.0") and has settings with `compat` "vllm". One call of `schedule` becomes these
events, in this order:

    GRAMMAR_READY*   for requests whose grammar this call found compiled
    PREEMPTED*       in the order of preemption
    EVICTED          encoder outputs that left the cache, if any did
    SCHEDULED        the rows that ran before; left out if there are none
    ADMITTED*        new and resumed requests, in the order of admission
    DISPATCHED       only with asynchronous scheduling

`update_from_output` becomes EXECUTED and FINISHED*, `update_draft_token_ids` DRAFTED, `add_request` QUEUED,
`finish_requests` CANCELLED and FINISHED for each request that it returned, `reset_prefix_cache` CACHE_RESET.
NOTED holds calls that no other event describes. A row is a number that the recorder gives to a request from
its admission until it leaves and no step in flight has it any more: the lowest free number. vLLM's own events
are of a whole call, so the order of preemptions and allocations within a call is not in the log; a replay
derives it.

Modules, from the bottom: `vllm_object` reads vLLM's objects by name; `contents` hashes token ids;
`host_facts` and `request_facts` translate vLLM's settings and requests; `entries` are small records that the
hooks collect; `batches` turns collected entries into events; `log_files` writes them; `recorder` holds the
hooks' bodies and the bookkeeping of rows; `hooks` overrides the public methods of a scheduler; only
`scheduler` imports vLLM. A fault in the recorder never reaches vLLM: it warns once, writes NOTED with the
kind "incomplete" as the log's last record, and steps aside.

`mmengine_vllm.Scheduler` (package `driving`) replaces vLLM's scheduler: mmengine's core decides and writes
the log, and vLLM's workers execute.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmengine_vllm.driving.scheduler import Scheduler as Scheduler
    from mmengine_vllm.scheduler import RecordingScheduler as RecordingScheduler


def __getattr__(name: str) -> object:
    if name == "RecordingScheduler":
        from mmengine_vllm.scheduler import RecordingScheduler  # lazy: imports vLLM

        return RecordingScheduler
    if name == "Scheduler":
        from mmengine_vllm.driving.scheduler import Scheduler  # lazy: imports vLLM

        return Scheduler
    raise AttributeError(name)
