"""What the running rows compute in a step, and who gives way when their blocks are not free."""

from typing import NamedTuple

import numpy as np

from mmengine.core.decide.encoder_draft import EncoderDraft
from mmengine.core.decide.leases import taken_back
from mmengine.core.state.blocks import further_blocks, threshold_of
from mmengine.core.state.columns import ReadOnlyArray
from mmengine.core.state.sessions import NO_BLOCKS
from mmengine.core.state.view import View
from mmengine.events import vocabulary as ev


class Wanted(NamedTuple):
    """The rows that get tokens (intp), how many each (int32), the encoder work for them, and whether
    it is surely one token each."""

    rows: ReadOnlyArray
    tokens: np.ndarray
    draft: EncoderDraft | None
    plain: bool


def schedule_running(
    view: View, rows: ReadOnlyArray, *, patient: bool = True
) -> ev.Preempted | ev.Scheduled | ev.Evicted | ev.LeaseTaken | None:
    """What `rows` (intp, in order) compute next, or who gives way first; None when they get nothing.
    `patient`: see EncoderDraft."""
    wanted = wanted_by(view, rows, patient)
    if not len(wanted.rows):
        return wanted.draft.left_behind(given_up=False) if wanted.draft else None
    short, further = further_blocks(view, view.config, wanted.rows, wanted.tokens)
    num_new = int(further.sum())
    if num_new <= view.blocks.num_free:
        return _scheduled(view, wanted, num_new)
    taken = taken_back(view, num_new - view.blocks.num_free, NO_BLOCKS) if len(view.sessions) else None
    if taken is not None:
        return taken
    return _until_shortage(view, wanted, short, further) if view.config.compat == "vllm" else _preempt(view)


def wanted_by(view: View, rows: ReadOnlyArray, patient: bool = True) -> Wanted:
    """What `rows` get if there are blocks: tokens in order, until the budgets are spent."""
    wanted = view.num_tokens[rows] - view.num_computed[rows]
    if view.flights:
        wanted = _ahead_of_results(view, rows, wanted)
    if view.has_drafts or (view.config.num_draft_tokens and view.config.compat):
        wanted = wanted + view.num_drafts[rows]
        wanted = np.minimum(wanted, view.config.max_model_len - 1 - view.num_computed[rows])
    if view.config.compat and view.made_room_for[0] == rows[0]:
        wanted[0] = min(wanted[0], view.made_room_for[1])
    draft = None
    plain = len(rows) <= view.tokens_left and np.count_nonzero(wanted != 1) == 0  # one token each
    if not plain:
        wanted = _within_limits(view, wanted)
    if view.num_with_media:
        ahead = bool(view.config.lookahead_tokens)
        media = np.flatnonzero(view.next_media[rows] < view.num_computed[rows] + wanted + ahead)
        if len(media):
            draft, plain = EncoderDraft(view, patient=patient), False
            wanted = _cut_at_media(view, rows, wanted, media, draft)
    if not plain:
        wanted = _within_budget(wanted, view.tokens_left)
        rows, wanted = rows[wanted > 0], wanted[wanted > 0]
    return Wanted(rows, wanted, draft, plain)


def _ahead_of_results(view: View, rows: ReadOnlyArray, wanted: np.ndarray) -> np.ndarray:
    """`wanted` with the tokens that steps in flight will give; 0 for rows that wait for them, because
    they end there or because they wait for each (core/state/overlap.py)."""
    pending = view.num_pending[rows]
    waits = (pending > 0) & (view.num_tokens[rows] + pending >= np.abs(view.runs_ahead_to[rows]))
    wanted = wanted + pending
    wanted[waits] = 0
    return wanted


def _scheduled(view: View, wanted: Wanted, num_new: int) -> ev.Scheduled:
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


def _until_shortage(
    view: View, wanted: Wanted, short: np.ndarray, further: np.ndarray
) -> ev.Preempted | ev.Scheduled | ev.Evicted:
    """vLLM serves row after row: those before the one whose blocks are not free keep what they got, and
    someone gives way for that one's chunk as it was cut while all were there. `short`, `further`: see
    further_blocks."""
    lacking = int(np.argmax(np.cumsum(further) > view.blocks.num_free))
    hand = int(wanted.rows[short[lacking]])
    undecided = view.running[view.num_decided :]
    place = undecided.tolist().index(hand)
    if short[lacking]:
        return _scheduled(view, wanted_by(view, undecided[:place]), int(further[:lacking].sum()))
    draft, victim = wanted_by(view, undecided[: place + 1]).draft, view.policy.victim(view)
    left_behind = draft.left_behind(given_up=victim == hand) if draft else None
    return left_behind or _preempt(view, hand, int(wanted.tokens[0]))


def _preempt(view: View, for_row: int = ev.FOR_ALL, for_tokens: int = 0) -> ev.Preempted:
    """The policy's victim gives way: its KV is swapped out where that is asked for or costs less than
    computing it again, and the host pool has room."""
    config, row = view.config, view.policy.victim(view)
    req_state = view.requests_by_row[row]
    name = req_state.request.request_id
    num_computed = int(view.num_computed[row])
    num_blocks = -(-num_computed // view.block_size)
    free = view.free_host_blocks
    cheaper = num_blocks * config.swap_block_ns < num_computed * config.recompute_token_ns
    wanted = config.preempt_mode == "swap" or (config.preempt_mode == "auto" and cheaper)
    if req_state.request.sampling.prompt_logprobs is not None:  # those of a part would be lost
        wanted = wanted and int(view.num_tokens[row]) > req_state.num_prompt
    if config.num_state_slots:  # a state is computed again, or copied from one that was kept
        wanted = False
    if not wanted or not 0 < num_blocks <= len(free) or view.scheduled[row]:
        return ev.Preempted(name, row, "recompute", "no free blocks", for_row=for_row, for_tokens=for_tokens)
    return ev.Preempted(
        name, row, "swap", "no free blocks", free[::-1][:num_blocks].tobytes(), for_row, for_tokens
    )


def _draft_columns(view: View, rows: ReadOnlyArray, wanted: np.ndarray) -> dict[str, bytes]:
    """How many of the rows' tokens are drafts and who made them; empty when there are none."""
    if not view.config.num_draft_tokens:
        return {}
    behind = view.num_computed[rows] + wanted - view.num_tokens[rows]
    if view.flights:
        behind = behind - view.num_pending[rows]
    num_drafts = np.maximum(behind, 0)
    if not num_drafts.any():
        return {}
    drafters = view.drafter[rows]
    columns = {"num_drafts": num_drafts.tobytes()}
    return {**columns, "drafters": drafters.tobytes()} if drafters.any() else columns


def _within_limits(view: View, wanted: np.ndarray) -> np.ndarray:
    threshold = threshold_of(view.config, len(view.requests))
    return np.minimum(wanted, threshold) if threshold else wanted


def _within_budget(wanted: np.ndarray, budget: int) -> np.ndarray:
    """Serve rows in order until the budget is spent; int32 like `wanted`."""
    before = np.cumsum(wanted, dtype=np.int64) - wanted
    return np.clip(budget - before, 0, wanted).astype(np.int32)


def _cut_at_media(
    view: View, rows: ReadOnlyArray, wanted: np.ndarray, media: np.ndarray, draft: EncoderDraft
) -> np.ndarray:
    """Cut the chunks of rows (places `media` in `rows`) whose next embeddings do not fit."""
    wanted = wanted.copy()
    for place in media.tolist():
        left = max(0, view.tokens_left - int(wanted[:place].sum()))
        row, length = int(rows[place]), min(int(wanted[place]), left)
        start = int(view.num_computed[row])
        wanted[place] = draft.cut(view.requests_by_row[row], row, start, length)
    return wanted
