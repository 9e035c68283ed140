"""mmengine's event log for vLLM: records the decisions of vLLM's scheduler, or replaces this scheduler. This
package is a separate distribution that is installed in vLLM's environment.

    MMENGINE_LOG=run.log vllm serve MODEL --scheduler-cls mmengine_vllm.RecordingScheduler

The log is an ordinary mmengine log, so `mmengine log` reads it without vLLM and without a GPU. The event
STARTED names the host ("vllm 0.32.0") and contains settings with `compat` "vllm". Each call of `schedule`
becomes these events, in this order (`*`: any number):

    GRAMMAR_READY*  requests whose grammar is now compiled
    PREEMPTED*      in the order of preemption
    EVICTED         encoder outputs that left the cache; omitted if there are none
    SCHEDULED       rows that were running before; omitted if there are none
    ADMITTED*       new and resumed requests, in the order of admission
    DISPATCHED      only with asynchronous scheduling

`update_from_output` becomes EXECUTED and FINISHED*. `update_draft_token_ids` becomes DRAFTED. `add_request`
becomes QUEUED. `finish_requests` becomes CANCELLED and FINISHED for each returned request.
`reset_prefix_cache` becomes CACHE_RESET. Calls that no other event describes become NOTED.

At admission, the recorder gives a request the lowest free row number. The number becomes free again when the
request has left and no step in flight contains the request. vLLM's outputs describe whole calls, so the log
does not contain the order of preemptions and allocations within a call. A replay derives this order.

Modules, from the bottom up: `vllm_object` reads vLLM's objects by name; `columns` makes bytes and
arrays from ints; `contents` hashes token ids; `host_facts` and `request_facts` translate vLLM's settings and
requests; `entries` defines small records that the recorder collects; `batches` turns these records into
events; `log_files` writes events; `recorder` follows the calls and assigns rows; `hooks` overrides the public
methods of a scheduler; only `scheduler` imports vLLM. An error in the recorder never reaches vLLM: the
recorder logs one warning, writes NOTED with the kind "incomplete" as the last record, and stops.

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
