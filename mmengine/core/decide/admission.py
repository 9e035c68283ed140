"""Decides which waiting request starts next, and its KV blocks and encoder work."""

from collections.abc import Callable

import numpy as np
from msgspec.structs import asdict

from mmengine.core.decide.adapter_places import AdapterPlaces
from mmengine.core.decide.encoder_draft import EncoderDraft
from mmengine.core.decide.fetches import PASSED, Passed, decide_fetch
from mmengine.core.decide.leases import lease_to_take
from mmengine.core.decide.start import Start, start_of
from mmengine.core.decide.whole_runs import whole_chunk
from mmengine.core.state.blocks import threshold_of
from mmengine.core.state.prefix_index import NO_BLOCK
from mmengine.core.state.read_only import RequestView
from mmengine.core.state.uniform_window import num_skipped
from mmengine.core.state.view import View
from mmengine.events import vocabulary as ev

AdmissionDecision = ev.Admitted | ev.Evicted | ev.Fetched | ev.LeaseTaken
MayStart = Callable[[RequestView], bool]


class Admission:
    """Admits waiting requests by this engine's rules. A subclass may override the methods below the comment
    "Rules that a subclass may override".

    `stops_at_encoder`: whether a request that must wait for the encoder also blocks all later requests.
    """

    stops_at_encoder = False

    def admit_next(self, view: View, may_start: MayStart | None = None) -> AdmissionDecision | None:
        """Return ADMITTED for the first waiting request that can start, or None.

        `may_start` selects the candidates; None: all waiting requests. Returns FETCHED instead if a block
        store has a longer prefix than the prefix cache. Returns LEASETAKEN instead if blocks must first be
        taken from a session's lease. Only vLLM's rules return EVICTED.

        A request is skipped while it waits for a grammar, a block store, an adapter place, the encoder, or
        its group leader's prefill. If a request waits for free blocks, all later requests wait too.
        """
        if not view.free_rows or view.tokens_left <= 0 or (view.preempted_in_step and len(view.running)):
            return None
        if len(view.running) >= view.config.max_num_seqs:
            return None
        if view.config.num_state_slots and not view.states.num_free:
            return None
        places = self.places(view, may_start)
        for req_state in view.tenants.rest():
            if may_start is not None and not may_start(req_state):
                continue
            if places is not None and not places.has_place(req_state):
                continue
            start = start_of(view, req_state)
            if start is None:
                continue
            if req_state.num_offered > len(start.cached) and not start.swap_in:
                fetch = self._fetch(view, req_state, start)
                if fetch == PASSED:
                    continue
                return fetch
            length = self.first_chunk(view, req_state, start)
            if not length:
                return None
            draft = self.draft(view)
            length = self.cut(view, draft, req_state, start, length)
            admission = self._admission(view, req_state, start, length, draft) if length else None
            decision = admission or draft.left_behind(given_up=length > 0)
            if length or decision is not None:
                return decision
            if self.stops_at_encoder:
                return None
            if places is not None:
                places.pass_over(req_state)
        return None

    def first_large_item(self, view: View, may_start: MayStart) -> tuple[RequestView, int] | None:
        """Return the first waiting request that waits only for a large media item's encoding, and the item's
        index. Returns None if no request waits for this reason.

        A large item is encoded in parts before its request starts. The search ends at the first request that
        blocks all later requests.
        """
        if not view.free_rows or view.tokens_left <= 0:
            return None
        places = self.places(view, may_start)
        for req_state in view.tenants.rest():
            if not may_start(req_state) or (start := start_of(view, req_state)) is None:
                continue
            if places is not None and not places.has_place(req_state):
                continue
            length = self.first_chunk(view, req_state, start)
            draft = self.draft(view)
            if not length or self.cut(view, draft, req_state, start, length):
                return None
            if draft.large is not None:
                return draft.large
        return None

    def examined_in_step(self, view: View) -> set[str]:
        """Return the ids of the waiting requests that the current step's admissions examined. Call this
        method after all decisions of the step were applied."""
        examined = {req_state.request.request_id for req_state in view.tenants.passed()}

        def examine(req_state: RequestView) -> bool:
            examined.add(req_state.request.request_id)
            return True

        if not view.preempted_in_step:
            self.admit_next(view, examine)
        return examined

    def first_chunk(self, view: View, req_state: RequestView, start: Start) -> int:
        """Return the length of the request's first chunk within the token budget.

        Returns 0 if the chunk cannot be split and the step has too few tokens left. The request then blocks
        all later requests.
        """
        left = len(req_state.tokens) - start.num_computed
        if left == 1 and (padding := self.padding(view, start.num_computed)):
            left += padding
            if left > view.tokens_left:
                return 0
        length = min(left, view.tokens_left, threshold_of(view.config, len(view.requests)) or left)
        return whole_chunk(view, req_state, start.num_computed, length)

    def cut(self, view: View, draft: EncoderDraft, req_state: RequestView, start: Start, length: int) -> int:
        """Return the first chunk's length up to the first media item that exceeds the encoder's limits.
        Returns 0 if the request cannot start in this step.
        """
        length = draft.cut(req_state, view.free_rows[-1], start.num_computed, length)
        return whole_chunk(view, req_state, start.num_computed, length) if length else 0

    def blocks_wanted(self, view: View, req_state: RequestView, start: Start, length: int) -> int:
        """Return how many blocks must be free before the request can start with `length` tokens.

        Counts the request's new blocks, or its reserved blocks if these are more. Also counts prefix hits
        that are on the free list.
        """
        num_needed = blocks_held(view, start, length)
        num_new = max(num_needed, self._num_reserved(view, req_state)) - len(start.cached)
        return num_new + num_free_hits(view, start.cached)

    # Rules that a subclass may override

    def draft(self, view: View) -> EncoderDraft:
        """Return an empty EncoderDraft, which collects a decision's encoder work."""
        return EncoderDraft(view)

    def places(self, view: View, may_start: MayStart | None = None) -> AdapterPlaces | None:
        """Return the step's places for adapters, or None if the engine takes no adapters."""
        return AdapterPlaces(view, may_start) if view.config.max_loras else None

    def padding(self, view: View, num_computed: int) -> int:
        """Return how many draft placeholders to schedule for a request that starts with only one token
        to compute."""
        return 0

    def prompt_reserve(self, view: View, req_state: RequestView) -> int:
        """Return how many blocks the setting `admission_reserve` "prompt" reserves, including prefix hits."""
        return most_blocks(view, len(req_state.tokens))

    # Parts of `admit_next`

    def _num_reserved(self, view: View, req_state: RequestView) -> int:
        """Return how many blocks `admission_reserve` reserves for the request, including prefix hits."""
        match view.config.admission_reserve:
            case "none":
                return 0
            case "prompt":
                return self.prompt_reserve(view, req_state)
        longest = req_state.num_prompt + req_state.request.sampling.max_tokens
        return most_blocks(view, min(longest, view.config.max_model_len))

    def _num_lacking(self, view: View, req_state: RequestView, start: Start, length: int) -> int:
        return max(0, self.blocks_wanted(view, req_state, start, length) - view.blocks.num_free)

    def _admission(
        self, view: View, req_state: RequestView, start: Start, length: int, draft: EncoderDraft
    ) -> ev.Admitted | ev.LeaseTaken | None:
        """Return ADMITTED for a chunk of `length` tokens. If blocks are short, return LEASETAKEN if a lease
        can free enough blocks, else None.
        """
        if lacking := self._num_lacking(view, req_state, start, length):
            return _take_back(view, start, lacking)
        cached = start.cached
        revived = num_free_hits(view, cached)
        num_new = blocks_held(view, start, length) - len(cached)
        new = _next_free(view, cached, revived, num_new)
        admitted = ev.Admitted(
            request_id=req_state.request.request_id,
            row=view.free_rows[-1],
            num_tokens=length,
            cached_blocks=cached.tobytes(),
            new_blocks=new.tobytes(),
            encode=tuple(draft.encode),
            evict=tuple(draft.evict),
            num_computed=ev.AS_CACHED
            if start.num_computed == len(cached) * view.block_size and not view.config.block_groups
            else start.num_computed,
            copy=(start.copy_from, int(new[0])) if start.copy_from != NO_BLOCK else None,
            swap_in=start.swap_in,
        )
        if view.config.num_state_slots:
            admitted = _with_state(view, admitted, start)
        adapter = req_state.request.adapter
        if adapter is None:
            return admitted
        return ev.AdmittedWithAdapter(
            **asdict(admitted), adapters_out=tuple(view.adapters.room_for(adapter) or ())
        )

    def _fetch(
        self, view: View, req_state: RequestView, start: Start
    ) -> ev.Fetched | ev.LeaseTaken | Passed | None:
        """Return FETCHED for the blocks that a store offers beyond the prefix hits.

        Returns PASSED while another request fetches the same blocks. If blocks are short, returns LEASETAKEN
        if a lease can free enough blocks, else None.
        """
        count = req_state.num_offered - len(start.cached)
        if lacking := self._num_lacking(view, req_state, start, count * view.block_size):
            return _take_back(view, start, lacking)
        new = _next_free(view, start.cached, num_free_hits(view, start.cached), count)
        return decide_fetch(view, req_state, start.cached, new)


def blocks_for(view: View, num_tokens: int) -> int:
    """Return how many blocks are needed for `num_tokens` tokens and the drafter's lookahead."""
    return -(-min(num_tokens + view.config.lookahead_tokens, view.config.max_model_len) // view.block_size)


def blocks_held(view: View, start: Start, length: int) -> int:
    """Return how many blocks a row holds, summed over all groups, if the row begins with `start` and computes
    `length` tokens.
    """
    count = blocks_for(view, start.num_computed + length)
    if view.num_groups == 1:
        return count - num_skipped(view.config, start.num_computed)
    return count * view.num_groups - int(view.windows.first_needed(start.num_computed).sum())


def most_blocks(view: View, num_tokens: int) -> int:
    """Return how many blocks a row with `num_tokens` tokens needs at most, summed over all groups."""
    return view.config.most_blocks(num_tokens) if view.config.block_groups else blocks_for(view, num_tokens)


def _with_state(view: View, admitted: ev.Admitted, start: Start) -> ev.AdmittedWithState:
    """Return the decision with a free state slot for the row.

    The slot that holds the row's starting state is chosen only if no other slot is free.
    """
    slots = view.states.peek(2)
    slot = next((slot for slot in slots.tolist() if slot != start.state_from), start.state_from)
    return ev.AdmittedWithState(
        **asdict(admitted), state_slot=slot, state_from=start.state_from, num_shared=start.num_shared
    )


def _take_back(view: View, start: Start, num_lacking: int) -> ev.LeaseTaken | None:
    return lease_to_take(view, num_lacking, start.cached) if len(view.sessions) else None


def num_free_hits(view: View, cached: np.ndarray) -> int:
    return int((view.blocks.references[cached] == 0).sum())


def _next_free(view: View, cached: np.ndarray, revived: int, count: int) -> np.ndarray:
    """Return the next `count` free blocks, int32, that are not among the prefix hits `cached`. `revived`: the
    number of prefix hits that are free blocks."""
    blocks = view.blocks.peek(count + revived) if revived else view.blocks.peek(count)
    return blocks[~np.isin(blocks, cached)][:count] if revived else blocks
