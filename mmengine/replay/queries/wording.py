"""The texts with which the query `why` explains a log. A log that was recorded in vLLM is explained with
vLLM's terms.
"""

from mmengine.events import vocabulary as ev
from mmengine.replay.host_rules import rules_for
from mmengine.replay.queries import reasons as kinds
from mmengine.replay.queries.reasons import Reason


class Words:
    """Texts with mmengine's terms. `started`: the log's first event."""

    def __init__(self, started: ev.Started):
        self.config = started.config

    def claim(self, text: str) -> str:
        """Return `text`. VllmWords replaces "this build's rules" with the name of the rules for vLLM's
        version.
        """
        return text

    def reason(self, reason: Reason, step: int) -> str:
        """Return the reason why a request got no tokens in `step`, as a clause."""
        return reason.sentence()

    def arrival(self, num_prompt: int, details: str, num_running: int, num_waiting: int) -> str:
        return (
            f"Arrived with {num_prompt} prompt tokens{details}; {num_running} running, {num_waiting} waiting."
        )

    def admission(self, event: ev.Admitted, *, is_again: bool, num_computed: int) -> str:
        return f"Admitted{' again' if is_again else ''} to row {event.row}."

    def preemption(self, reason: str) -> str:
        return reason

    def recomputed(self, num_tokens: int) -> str:
        """Return a sentence about a preempted request's computed tokens."""
        return f"{num_tokens} computed tokens are computed again."

    def status(self, reason: str) -> str:
        """Return vLLM's finish status as a prefix for the finish reason, or ""."""
        return ""


class VllmWords(Words):
    """Texts with the terms of vLLM's scheduler. `differs`: the first step whose decisions differ from the
    rules for vLLM's version, or -1.
    """

    def __init__(self, started: ev.Started, differs: int):
        super().__init__(started)
        self._rules, self._differs = rules_for(started).name or started.host, differs

    def claim(self, text: str) -> str:
        for ours, theirs in (("This build's", "The"), ("this build's", "the")):
            text = text.replace(f"{ours} rules", f"{theirs} rules of {self._rules}")
        return text

    def reason(self, reason: Reason, step: int) -> str:
        if reason.kind == kinds.OTHER and step != self._differs:
            return self._unexplained(step)
        text = _OF_VLLM.get(reason.kind)
        if text is None:
            return self.claim(reason.sentence())
        return text.format(r=reason, c=self.config, rules=self._rules)

    def _unexplained(self, step: int) -> str:
        if 0 <= self._differs < step:
            return (
                f"not compared, as the log differs from the rules of {self._rules} since step {self._differs}"
            )
        return f"the rules of {self._rules} pass it over, too"

    def arrival(self, num_prompt: int, details: str, num_running: int, num_waiting: int) -> str:
        return (
            f"Arrived (add_request): num_prompt_tokens {num_prompt}{details}; {num_running} in the running "
            f"queue, {num_waiting} in the waiting queue."
        )

    def admission(self, event: ev.Admitted, *, is_again: bool, num_computed: int) -> str:
        what = "Resumed" if is_again else "Admitted"
        return (
            f"{what} from the waiting queue: num_computed_tokens {num_computed}, num_scheduled_tokens "
            f"{event.num_tokens}."
        )

    def preemption(self, reason: str) -> str:
        return "allocate_slots found too few free blocks" if reason == "no free blocks" else reason

    def recomputed(self, num_tokens: int) -> str:
        return f"num_computed_tokens goes from {num_tokens} to 0, and the request back to the waiting queue."

    def status(self, reason: str) -> str:
        return _STATUSES.get(reason, "")


_OF_VLLM = {
    kinds.BLOCKS: "allocate_slots needs {r.needed} blocks, {r.free} are free, {r.short} short",
    kinds.ROWS: "max_num_seqs ({c[max_num_seqs]}) requests are in the running queue",
    kinds.TOKENS: "token_budget is spent (max_num_scheduled_tokens {c[token_budget]})",
    kinds.ENCODER_CACHE: "the encoder cache has no room: an item needs {r.needed} embeddings, {r.free} can "
    "be had, {r.short} short",
    kinds.ENCODER_BUDGET: "encoder_compute_budget does not suffice: an item needs {r.needed} embeddings, "
    "{r.free} are left, {r.short} short",
    kinds.ADAPTERS: "scheduled_loras has max_loras ({r.needed}) adapters",
    kinds.GRAMMAR: "its status is WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR: the grammar is not compiled yet",
    kinds.BEHIND: "{r.other} is ahead of it in the waiting queue and is not scheduled",
    kinds.FLIGHT: "num_new_tokens is 0: a step in flight computes its last token",
    kinds.PREEMPTING: "preempted_reqs is not empty, so this call takes nothing from the waiting queue",
    kinds.CHUNK: "num_new_tokens is rolled back to 0: the chunk would end inside an image or video, which "
    "disable_chunked_mm_input forbids",
    kinds.OTHER: "the rules of {rules} would have scheduled the request",
}
_STATUSES = {
    "length": "FINISHED_LENGTH_CAPPED, ",
    "stop": "FINISHED_STOPPED, ",
    "abort": "FINISHED_ABORTED, ",
    "error": "FINISHED_ERROR, ",
}


def words_of(started: ev.Started, differs: int) -> Words:
    """Return the texts for a log that begins with `started`. `differs`: see VllmWords."""
    return VllmWords(started, differs) if started.host.startswith("vllm") else Words(started)
