"""What the running rows compute in a step, and who gives way when their blocks are not free."""

import numpy as np

from mmengine.core.blocks import blocks_needed, threshold_of
from mmengine.core.encoder_draft import EncoderDraft
from mmengine.core.state import View
from mmengine.events import vocabulary as ev


def schedule_running(view: View, rows: np.ndarray) -> ev.Preempted | ev.Scheduled | ev.Evicted | None:
    wanted = view.num_tokens[rows] - view.num_computed[rows]
    if view.config.num_draft_tokens:
        wanted = wanted + view.num_drafts[rows]
        wanted = np.minimum(wanted, view.config.max_model_len - 1 - view.num_computed[rows])
    draft = None
    plain = len(rows) <= view.tokens_left and np.count_nonzero(wanted != 1) == 0  # one token each
    if not plain:
        wanted = _within_limits(view, wanted)
    if view.num_with_media:
        ahead = bool(view.config.lookahead_tokens)
        media = np.flatnonzero(view.next_media[rows] < view.num_computed[rows] + wanted + ahead)
        if len(media):
            draft, plain = EncoderDraft(view), False
            wanted = _cut_at_media(view, rows, wanted, media, draft)
    if not plain:
        wanted = _within_budget(wanted, view.tokens_left)
        rows, wanted = rows[wanted > 0], wanted[wanted > 0]
        if not len(rows):
            return draft.left_behind(given_up=False) if draft else None
    num_new = int(blocks_needed(view, rows, wanted).sum())
    if num_new > view.blocks.num_free:
        return _preempt(view)
    same = rows.tobytes() == view.last_rows.tobytes()
    return ev.Scheduled(
        rows=None if same else rows.astype(np.int32).tobytes(),
        num_tokens=None if plain or int(wanted.max()) == 1 else wanted.tobytes(),
        new_blocks=view.blocks.free_list.peek(num_new).tobytes() if num_new else b"",
        encode=tuple(draft.encode) if draft else (),
        evict=tuple(draft.evict) if draft else (),
        **_draft_columns(view, rows, wanted),
    )


def _preempt(view: View) -> ev.Preempted:
    """The policy's victim gives way: its KV is swapped out where that is asked for or costs less than
    computing it again, and the host pool has room."""
    config, row = view.config, view.policy.victim(view)
    name = view.requests_by_row[row].request.request_id
    num_computed = int(view.num_computed[row])
    num_blocks = -(-num_computed // view.block_size)
    free = view.free_host_blocks
    cheaper = num_blocks * config.swap_block_ns < num_computed * config.recompute_token_ns
    wanted = config.preempt_mode == "swap" or (config.preempt_mode == "auto" and cheaper)
    if not wanted or not 0 < num_blocks <= len(free):
        return ev.Preempted(name, row, "recompute", "no free blocks")
    return ev.Preempted(name, row, "swap", "no free blocks", free[::-1][:num_blocks].tobytes())


def _draft_columns(view: View, rows: np.ndarray, wanted: np.ndarray) -> dict[str, bytes]:
    """How many of the rows' tokens are drafts and who made them; empty when there are none."""
    if not view.config.num_draft_tokens:
        return {}
    num_drafts = np.maximum(view.num_computed[rows] + wanted - view.num_tokens[rows], 0)
    if not num_drafts.any():
        return {}
    drafters = view.drafter[rows]
    columns = {"num_drafts": num_drafts.tobytes()}
    return {**columns, "drafters": drafters.tobytes()} if drafters.any() else columns


def _within_limits(view: View, wanted: np.ndarray) -> np.ndarray:
    threshold = threshold_of(view)
    return np.minimum(wanted, threshold) if threshold else wanted


def _within_budget(wanted: np.ndarray, budget: int) -> np.ndarray:
    """Serve rows in order until the budget is spent; int32 like `wanted`."""
    before = np.cumsum(wanted, dtype=np.int64) - wanted
    return np.clip(budget - before, 0, wanted).astype(np.int32)


def _cut_at_media(
    view: View, rows: np.ndarray, wanted: np.ndarray, media: np.ndarray, draft: EncoderDraft
) -> np.ndarray:
    """Cut the chunks of rows (places `media` in `rows`) whose next embeddings do not fit."""
    wanted = wanted.copy()
    for place in media.tolist():
        left = max(0, view.tokens_left - int(wanted[:place].sum()))
        row, length = int(rows[place]), min(int(wanted[place]), left)
        start = int(view.num_computed[row])
        wanted[place] = draft.cut(view.requests_by_row[row], row, start, length)
    return wanted
