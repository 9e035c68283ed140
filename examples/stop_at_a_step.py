"""Open a log at a step, print the state, and run the real scheduler on this state.

    python examples/stop_at_a_step.py run.log 9

At a breakpoint in mmengine/core/decide/scheduler.py, the debugger shows the engine's state at this step.
"""

import sys

from mmengine.replay import open_log

log = open_log(sys.argv[1])
step = log.at(int(sys.argv[2]))

print(f"step {step.number}: {step.view.blocks.num_free} blocks free")
for row in step.view.running.tolist():
    name = step.view.requests_by_row[row].request.request_id
    print(
        f"  row {row}: {name}, {step.view.num_computed[row]} of {step.view.num_tokens[row]} tokens computed"
    )

while (event := step.next_decision()) is not None:
    print("decides", type(event).__name__, getattr(event, "request_id", ""))
print("as logged" if step.decided == step.logged else "not as logged")
