"""Decides how many tokens each running row computes in a step, and which row to preempt if blocks run out."""

from typing import Any, NamedTuple

import numpy as np

from mmengine.core.decide.encoder_draft import EncoderDraft
from mmengine.core.decide.leases import lease_to_take
from mmengine.core.decide.whole_runs import whole_chunk
from mmengine.core.state.blocks import further_blocks, threshold_of
from mmengine.core.state.columns import ReadOnlyArray
from mmengine.core.state.sessions import NO_BLOCKS
from mmengine.core.state.view import View
from mmengine.events import vocabulary as ev


class Wanted(NamedTuple):
    """The rows that get tokens in a step.

    `rows`: intp. `tokens`: each row's token count, int32. `draft`: the encoder work for these rows, or
    None. `plain`: whether each row gets exactly one token and no row needs encoder work.
    """

    rows: ReadOnlyArray
    tokens: np.ndarray
    draft: EncoderDraft | None
    plain: bool


class RunningRows:
    """Schedules running rows by this engine's rules. A subclass may override the methods below the comment
    "Rules that a subclass may override"."""

    def schedule(
        self, view: View, rows: ReadOnlyArray
    ) -> ev.Preempted | ev.Scheduled | ev.Evicted | ev.LeaseTaken | None:
        """Return SCHEDULED for `rows` (intp, in order). If blocks are short, return an event that frees
        blocks. Return None if no row gets tokens."""
        wanted = self.wanted_by(view, rows)
        if not len(wanted.rows):
            return wanted.draft.left_behind(given_up=False) if wanted.draft else None
        short, further = further_blocks(view, view.config, wanted.rows, wanted.tokens)
        num_new = int(further.sum()) * view.num_groups
        if num_new <= view.blocks.num_free:
            return self.scheduled(view, wanted, num_new)
        taken = lease_to_take(view, num_new - view.blocks.num_free, NO_BLOCKS) if len(view.sessions) else None
        return taken if taken is not None else self.relieve(view, wanted, short, further)

    def wanted_by(self, view: View, rows: ReadOnlyArray) -> Wanted:
        """Return the tokens that `rows` get if enough blocks are free. Rows get tokens in order until the
        token budget is used up.
        """
        wanted = self.tokens_left(view, rows)
        draft = None
        plain = len(rows) <= view.tokens_left and np.count_nonzero(wanted != 1) == 0
        if not plain:
            wanted = _within_limits(view, wanted)
        if view.num_with_media:
            ahead = bool(view.config.lookahead_tokens)
            media = np.flatnonzero(view.next_media[rows] < view.num_computed[rows] + wanted + ahead)
            if len(media):
                draft, plain = self.draft(view), False
                wanted = _cut_at_media(view, rows, wanted, media, draft)
        if not plain:
            wanted = _within_budget(wanted, view.tokens_left)
            rows, wanted = rows[wanted > 0], wanted[wanted > 0]
        return Wanted(rows, wanted, draft, plain)

    # Rules that a subclass may override

    def draft(self, view: View) -> EncoderDraft:
        """Return an empty EncoderDraft, which collects a decision's encoder work."""
        return EncoderDraft(view)

    def tokens_left(self, view: View, rows: ReadOnlyArray) -> np.ndarray:
        """Return how many tokens each row could compute now, drafts included, int32."""
        wanted = view.num_tokens[rows] - view.num_computed[rows]
        if view.flights:
            wanted = _ahead_of_results(view, rows, wanted)
        if view.has_drafts:
            wanted = with_drafts(view, rows, wanted)
        return wanted

    def relieve(
        self, view: View, wanted: Wanted, short: np.ndarray, further: np.ndarray
    ) -> ev.Preempted | ev.Scheduled | ev.Evicted:
        """Return the next event if the rows need more blocks than are free. `short`, `further`: as returned
        by `further_blocks`."""
        return preempt(view)

    def scheduled(self, view: View, wanted: Wanted, num_new: int) -> ev.Scheduled:
        """Return SCHEDULED with the next `num_new` free blocks."""
        rows, tokens, draft, plain = wanted
        same = rows.tobytes() == view.last_rows.tobytes()
        return ev.Scheduled(
            rows=None if same else rows.astype(np.int32).tobytes(),
            num_tokens=None if plain or int(tokens.max()) == 1 else tokens.tobytes(),
            new_blocks=view.blocks.peek(num_new).tobytes() if num_new else b"",
            encode=tuple(draft.encode) if draft else (),
            evict=tuple(draft.evict) if draft else (),
            **({} if plain else _draft_columns(view, rows, tokens)),
        )


def with_drafts(view: View, rows: ReadOnlyArray, wanted: np.ndarray) -> np.ndarray:
    """Return `wanted` (each row's token count) plus the rows' drafts, limited by max_model_len."""
    return np.minimum(wanted + view.num_drafts[rows], view.config.max_model_len - 1 - view.num_computed[rows])


def preempt(view: View, for_row: int = ev.FOR_ALL, for_tokens: int = 0) -> ev.Preempted:
    """Return PREEMPTED for the row that the policy selects.

    The row's KV is swapped out if it fits into the host pool and `preempt_mode` prefers swapping. "swap"
    always prefers swapping; "auto" only if a swap costs less than a recompute.
    """
    config, row = view.config, view.policy.victim(view)
    req_state = view.requests_by_row[row]
    name = req_state.request.request_id
    num_computed = int(view.num_computed[row])
    num_blocks = -(-num_computed // view.block_size)
    free = view.free_host_blocks
    cheaper = num_blocks * config.swap_block_ns < num_computed * config.recompute_token_ns
    wanted = config.preempt_mode == "swap" or (config.preempt_mode == "auto" and cheaper)
    # A swap in the middle of the prompt would lose the prompt logprobs computed so far.
    if req_state.request.sampling.prompt_logprobs is not None:
        wanted = wanted and int(view.num_tokens[row]) > req_state.num_prompt
    if config.num_state_slots:  # recurrent states are never swapped
        wanted = False
    if not wanted or not 0 < num_blocks <= len(free) or view.scheduled[row]:
        return ev.Preempted(name, row, "recompute", "no free blocks", for_row=for_row, for_tokens=for_tokens)
    return ev.Preempted(
        name, row, "swap", "no free blocks", free[::-1][:num_blocks].tobytes(), for_row, for_tokens
    )


def _ahead_of_results(view: View, rows: ReadOnlyArray, wanted: np.ndarray) -> np.ndarray:
    """Return `wanted` plus the tokens that steps in flight will add to the rows. Rows that finish with these
    tokens, or must wait for them (core/state/overlap.py), get 0.
    """
    pending = view.num_pending[rows]
    waits = (pending > 0) & (view.num_tokens[rows] + pending >= np.abs(view.runs_ahead_to[rows]))
    wanted = wanted + pending
    wanted[waits] = 0
    return wanted


def _draft_columns(view: View, rows: ReadOnlyArray, wanted: np.ndarray) -> dict[str, Any]:
    """Return SCHEDULED's fields `num_drafts` and `drafters` as keyword arguments; {} without drafts."""
    if not view.config.num_draft_tokens:
        return {}
    beyond = view.num_computed[rows] + wanted - view.num_tokens[rows]
    if view.flights:
        beyond = beyond - view.num_pending[rows]
    num_drafts = np.maximum(beyond, 0)
    if not num_drafts.any():
        return {}
    drafters = view.drafter[rows]
    columns = {"num_drafts": num_drafts.tobytes()}
    return {**columns, "drafters": drafters.tobytes()} if drafters.any() else columns


def _within_limits(view: View, wanted: np.ndarray) -> np.ndarray:
    threshold = threshold_of(view.config, len(view.requests))
    return np.minimum(wanted, threshold) if threshold else wanted


def _within_budget(wanted: np.ndarray, budget: int) -> np.ndarray:
    """Return `wanted`, int32, limited to `budget` tokens in total. Earlier rows get their tokens first."""
    before = np.cumsum(wanted, dtype=np.int64) - wanted
    return np.clip(budget - before, 0, wanted).astype(np.int32)


def _cut_at_media(
    view: View, rows: ReadOnlyArray, wanted: np.ndarray, media: np.ndarray, draft: EncoderDraft
) -> np.ndarray:
    """Return `wanted`, with chunks shortened to end before embeddings that exceed the encoder's limits.
    Chunks never split a run if the setting `atomic_runs` is on. `media`: indices into `rows`, for rows whose
    chunks reach embeddings.
    """
    wanted = wanted.copy()
    for place in media.tolist():
        left = max(0, view.tokens_left - int(wanted[:place].sum()))
        row, length = int(rows[place]), min(int(wanted[place]), left)
        start, req_state = int(view.num_computed[row]), view.requests_by_row[row]
        length = whole_chunk(view, req_state, start, length)
        wanted[place] = draft.cut(req_state, row, start, length)
    return wanted
