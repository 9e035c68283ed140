"""Folds a recorded log as it is, and checks the invariants of its states."""

from mmengine.replay.checked_log import CheckedLog
from mmengine.replay.tape import INVARIANT
from mmengine.replay.verify_report import Divergence
from mmengine.replay.watcher import NAMES, Watcher

# These do not hold in a recorded log. A request that is aborted while its step runs leaves at once, a request
# gets tokens from before its preemption, steps with drafts overlap, and vLLM 0.32 counts only the adapters of
# scheduled requests.
_NOT_OF_VLLM = frozenset(("flights", "answers", "overlap", "adapters"))
OF_VLLM = tuple(name for name in NAMES if name not in _NOT_OF_VLLM)


def first_broken(log: CheckedLog) -> Divergence | None:
    """Return the first invariant that the recorded decisions break, or None. `log`: a log that was not read
    yet."""
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
