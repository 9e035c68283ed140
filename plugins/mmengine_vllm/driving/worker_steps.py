"""Translates a step's plan into vLLM's SchedulerOutput.

A SchedulerOutput contains only data that the workers lack, so this module tracks what the workers know.
"""

from collections import Counter
from collections.abc import Iterable

import numpy as np
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from mmengine.core.executor import Admission, StepPlan
from mmengine.core.state.view import View
from mmengine_vllm.vllm_object import VllmObject


class WorkerSteps:
    """Makes each step's SchedulerOutput, and tracks the requests that vLLM's workers know. `requests`: the
    scheduler's requests by id. `resends_resumed`: whether a resumed request is sent as a new request (for
    vLLM's second model runner). `zeroes_blocks`: whether the workers zero new blocks.
    """

    def __init__(
        self, view: View, requests: dict[str, VllmObject], *, resends_resumed: bool, zeroes_blocks: bool
    ):
        self._view, self._requests = view, requests
        self._resends_resumed, self._zeroes_blocks = resends_resumed, zeroes_blocks
        num_rows = view.config.max_num_seqs
        self._names = [""] * num_rows  # id of the request in each row
        self._num_prompt = np.zeros(num_rows, np.int32)
        self._num_sent = np.zeros(num_rows, np.int32)  # number of each row's blocks that the workers know
        self._has_grammar = np.zeros(num_rows, bool)
        self._known: set[str] = set()  # ids of the requests that the workers know
        self._rows, self.names = np.zeros(0, np.intp), list[str]()  # rows and request ids of the last step
        self._one_each: dict[str, int] = {}  # the ids in `names`, with one token each
        self._identifiers: dict[bytes, str] = {}  # vLLM's identifiers of cached encoder outputs
        self._num_entries: Counter[str] = Counter()  # number of cached outputs per identifier
        self.num_cached: dict[str, int] = {}  # cached prompt tokens at a request's first admission
        self.finished: set[str] = set()  # ids of requests that the workers must forget

    def forget(self, request_id: str) -> None:
        """Tell the workers in the next step to forget a request."""
        self.num_cached.pop(request_id, None)
        if request_id in self._known:
            self._known.remove(request_id)
            self.finished.add(request_id)

    def empty(self) -> SchedulerOutput:
        """Return a step without tokens, with only the finished requests' ids."""
        output = SchedulerOutput.make_empty()
        output.finished_req_ids, self.finished = self.finished, set()
        output.num_spec_tokens_to_schedule = self._view.config.num_draft_tokens  # for vLLM 0.32 and later
        return output

    def output(self, plan: StepPlan, preempted: Iterable[str]) -> SchedulerOutput:
        """Return the plan for the workers. `preempted`: ids of the requests preempted in this step."""
        output = self.empty()
        output.preempted_req_ids = set(preempted)
        before = set(self.names) if self._learn_rows(plan) else None
        names = self.names
        total = int(plan.num_scheduled.sum())
        if total == len(names):
            output.num_scheduled_tokens = self._one_each.copy()
        else:
            output.num_scheduled_tokens = dict(zip(names, plan.num_scheduled.tolist(), strict=True))
        output.total_num_scheduled_tokens = total
        new_blocks = self._new_blocks(plan)
        num_running = len(names) - len(plan.admitted)
        self._add_running(output.scheduled_cached_reqs, plan, num_running, new_blocks, before)
        for place, admission in enumerate(plan.admitted, num_running):
            self._add_admitted(output, plan, place, admission)
        if plan.num_drafts is not None and plan.num_drafts.any():
            self._add_drafts(output, plan)
        if plan.evict or plan.encode:
            self._add_encoder_work(output, plan)
        if self._has_grammar.any():
            sampled = plan.rows[plan.sample]
            forms = sampled[self._has_grammar[sampled]]
            output.has_structured_output_requests = bool(len(forms))
            output.pending_structured_output_tokens = bool((self._pending(forms) > 0).any())
        if self._zeroes_blocks:
            output.new_block_ids_to_zero = [block for added in new_blocks if added for block in added[0]]
        return output

    def _learn_rows(self, plan: StepPlan) -> bool:
        """Update the rows' request ids. Return whether the rows differ from the last step's."""
        for admission in plan.admitted:
            request = admission.request
            self._names[admission.row] = request.request_id
            self._num_prompt[admission.row] = len(request.prompt_token_ids)
            self._has_grammar[admission.row] = request.grammar is not None
        rows = plan.rows
        if not plan.admitted and (rows is self._rows or np.array_equal(rows, self._rows)):
            return False
        self._rows, self.names = rows, [self._names[row] for row in rows.tolist()]
        self._one_each = dict.fromkeys(self.names, 1)
        return True

    def _pending(self, rows: np.ndarray) -> np.ndarray:
        """Return how many tokens each of `rows` will get from earlier steps in flight. The view also counts
        this step's token, so 1 is subtracted.
        """
        pending = self._view.num_pending[rows]
        return pending - 1 if self._view.flights else pending

    def _new_blocks(self, plan: StepPlan) -> list[tuple[list[int], ...] | None]:
        """Return each row's blocks that are new to the workers, or None for a row without new blocks. All
        blocks of an admitted row are new.
        """
        rows, held = plan.rows, self._view.num_blocks[plan.rows]
        for admission in plan.admitted:
            self._num_sent[admission.row] = 0
        sent = self._num_sent[rows]
        found: list[tuple[list[int], ...] | None] = [None] * len(rows)
        places = (held > sent).nonzero()[0].tolist()
        for place in places:
            found[place] = (self._view.block_table[rows[place], sent[place] : held[place]].tolist(),)
        if places:
            self._num_sent[rows] = held
        return found

    def _add_running(
        self,
        cached: CachedRequestData,
        plan: StepPlan,
        number: int,
        new_blocks: list[tuple[list[int], ...] | None],
        before: set[str] | None,
    ) -> None:
        """Add the running requests, which are in the plan's first `number` rows, to `cached`. `before`: the
        last step's request ids, or None if the rows did not change.
        """
        rows, view = plan.rows[:number], self._view
        cached.req_ids = self.names[:number]
        cached.new_block_ids = new_blocks[:number]
        cached.num_computed_tokens = plan.num_computed[:number].tolist()
        num_outputs = view.num_tokens[rows] - self._num_prompt[rows]
        if view.flights:
            num_outputs += view.num_pending[rows]
            num_outputs[plan.sample[plan.sample < number]] -= 1
        cached.num_output_tokens = num_outputs.tolist()
        if before is not None and not self._resends_resumed:
            for place, name in enumerate(cached.req_ids):
                if name not in before:
                    row = rows[place]
                    cached.all_token_ids[name] = view.token_ids[row, : view.num_tokens[row]].tolist()

    def _add_admitted(
        self, output: SchedulerOutput, plan: StepPlan, place: int, admission: Admission
    ) -> None:
        name, tokens = admission.request.request_id, admission.token_ids.tolist()
        blocks = (self._view.block_table[admission.row, : self._num_sent[admission.row]].tolist(),)
        computed = int(plan.num_computed[place])
        if name in self._known and not self._resends_resumed:
            cached = output.scheduled_cached_reqs
            cached.req_ids.append(name)
            cached.resumed_req_ids.add(name)
            cached.new_block_ids.append(blocks)
            cached.num_computed_tokens.append(computed)
            cached.num_output_tokens.append(len(tokens) - len(admission.request.prompt_token_ids))
            cached.all_token_ids[name] = tokens
            return
        self._known.add(name)
        self.num_cached.setdefault(name, min(computed, len(admission.request.prompt_token_ids)))
        request = self._requests[name]
        output.scheduled_new_reqs.append(
            NewRequestData(
                req_id=name,
                prompt_token_ids=request.prompt_token_ids,
                mm_features=request.mm_features,
                sampling_params=request.sampling_params,
                pooling_params=None,
                block_ids=blocks,
                num_computed_tokens=computed,
                lora_request=request.lora_request,
                prefill_token_ids=tokens if self._resends_resumed else None,
            )
        )

    def _add_drafts(self, output: SchedulerOutput, plan: StepPlan) -> None:
        assert plan.num_drafts is not None
        ends = plan.num_computed + plan.num_scheduled
        for place in plan.num_drafts.nonzero()[0].tolist():
            row, end, count = plan.rows[place], int(ends[place]), int(plan.num_drafts[place])
            drafts = self._view.token_ids[row, end - count : end].tolist()
            output.scheduled_spec_decode_tokens[self.names[place]] = drafts

    def _add_encoder_work(self, output: SchedulerOutput, plan: StepPlan) -> None:
        for key in plan.evict:
            identifier = self._identifiers.pop(key, None)
            if identifier is None:
                continue
            self._num_entries[identifier] -= 1
            if not self._num_entries[identifier]:
                del self._num_entries[identifier]
                output.free_encoder_mm_hashes.append(identifier)
        for item in plan.encode:
            name = item.request.request_id
            identifier = self._requests[name].mm_features[item.index].identifier
            if self._identifiers.setdefault(item.key, identifier) == identifier:
                self._num_entries[identifier] += 1
            output.scheduled_encoder_inputs.setdefault(name, []).append(item.index)
