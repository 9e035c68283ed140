"""Names the rule of vLLM's scheduler that most likely explains a difference between a recorded log and the
derived decisions.
"""

from mmengine.core.state.view import View
from mmengine.replay.hosted.outcome import Difference, Outcome

_VICTIMS = {
    "fcfs": "under fcfs, allocate_slots that fails preempts self.running[-1], the request admitted last",
    "priority": "under priority, allocate_slots that fails preempts the running request with the largest "
    "(priority, arrival_time)",
}


def likely_rule(found: Difference, logged: Outcome, derived: Outcome, view: View, waiting: list[str]) -> str:
    """Return the rule that most likely explains a difference. `view`: the state after the derived call.
    `waiting`: the waiting queue before the call, first request first.
    """
    match found.field:
        case "preempted":
            return _VICTIMS.get(view.config.policy, _VICTIMS["fcfs"])
        case "admitted":
            return _admission(logged, derived, view, waiting)
        case "rows":
            return _tokens(logged, derived, view)
        case "computed":
            return "a hit has only full blocks, and at least the last known token is computed again"
        case "drafts":
            return (
                "drafts are the tokens beyond the known ones, within max_num_batched_tokens and max_model_len"
            )
        case "encoded":
            return (
                "an item whose placeholders overlap the chunk is encoded once, if it is not in the encoder "
                "cache and fits encoder budget and cache"
            )
        case "tables" | "blocks":
            return (
                "blocks are taken from the front of the free queue; when a request frees its blocks, those "
                "without a hash go to the front, and hashed blocks go to the back, the last block first"
            )
    return "encoder outputs are evicted only if space is needed, the longest unreferenced output first"


def _admission(logged: Outcome, derived: Outcome, view: View, waiting: list[str]) -> str:
    extra = [name for name in logged.admitted if name not in derived.admitted]
    missed = [name for name in derived.admitted if name not in logged.admitted]
    if missed and not extra:
        return (
            f"max_num_seqs, the token budget and the free blocks leave room for {missed[0]}, so the rules "
            "admit this request"
        )
    if extra and derived.preempted:
        return "a call that preempts admits no waiting request"
    if extra and len(view.running) >= view.config.max_num_seqs:
        return f"at most max_num_seqs ({view.config.max_num_seqs}) requests run"
    if extra:
        ahead = waiting[: waiting.index(extra[0])] if extra[0] in waiting else []
        passed = [name for name in ahead if name not in derived.admitted]
        if passed:
            return (
                f"{passed[0]} waits ahead of {extra[0]} and holds it back: its blocks are not free, or the "
                "encoder has no room for it (vLLM 0.32 stops there, 0.33 passes it over)"
            )
        return f"the {view.blocks.num_free} free blocks or the {view.tokens_left} tokens left do not suffice"
    return "waiting requests are admitted in the order of the queue"


def _tokens(logged: Outcome, derived: Outcome, view: View) -> str:
    total = sum(count for _, count in logged.rows)
    if total > view.config.token_budget:
        return f"a step has at most max_num_batched_tokens ({view.config.token_budget}) tokens, not {total}"
    ours, theirs = dict(derived.rows), dict(logged.rows)
    if ours.keys() == theirs.keys() and ours == theirs:
        return "running requests are scheduled in the order of their admission"
    return (
        "a running request gets its known tokens and drafts that are not computed yet, within the token "
        "budget, long_prefill_token_threshold, max_model_len, and before an item that the encoder cannot take"
    )
