"""Checks the state invariants in a log that was recorded in another engine. Records are applied, and no
decisions are derived.
"""

from mmengine.replay.checked_log import CheckedLog
from mmengine.replay.tape import INVARIANT
from mmengine.replay.verify_report import Divergence
from mmengine.replay.watcher import NAMES, Watcher

# Invariants that do not hold in a log recorded in vLLM. An aborted request leaves immediately, even while its
# step runs. A preempted request can get tokens from a step that began before the preemption. Steps with
# drafts overlap. vLLM 0.32 counts only the adapters of scheduled requests.
_NOT_OF_VLLM = frozenset(("flights", "answers", "overlap", "adapters"))
OF_VLLM = tuple(name for name in NAMES if name not in _NOT_OF_VLLM)


def first_broken(log: CheckedLog) -> Divergence | None:
    """Return the first invariant that the recorded decisions break, or None. `log` must not have been read
    before.
    """
    state = log.first_state()
    watcher = Watcher(state, OF_VLLM, has_outputs=False)
    for record in log:
        with log.naming(record):
            watcher.check_decision(record.event)
            if watcher.broken is None:
                watcher.follow(record.event)
                log.apply(state, record.event)
                watcher.check_state()
        if (found := watcher.broken) is not None:
            kind = type(record.event).__name__
            return Divergence(
                record.sequence, record.step, kind, INVARIANT + found.name, "holds", found.text, []
            )
    return None
