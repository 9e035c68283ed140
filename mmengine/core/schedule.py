"""The scheduler: what the next event of the open step is.

There is no prefill phase and no decode phase: each request's computed tokens catch up with its
known tokens. A step is decided one event at a time, each a pure function of the state that the
event before left behind:

    PREEMPTED*   while the running rows need more blocks than are free
    SCHEDULED    the running rows, in admission order
    ADMITTED*    waiting requests, while there are rows, tokens and blocks

so that a block scheduled by one event can be a prefix hit of the next.
"""

from typing import NamedTuple

import numpy as np

from mmengine.core.blocks import block_extras, blocks_needed, content_windows
from mmengine.core.prefix_index import ROOT
from mmengine.core.request_state import RequestState
from mmengine.core.state import View
from mmengine.encoder_cache.cache import EncoderCache
from mmengine.events import vocabulary as ev

DECISION_VERSION = 1


def schedule(view: View) -> ev.Preempted | ev.Scheduled | ev.Admitted | None:
    """The next decision of this step; None when the step is complete, or nothing can run."""
    if view.policy.prefill_first:
        return _prefill_first(view)
    if not view.is_open and len(view.running):
        event = _schedule_running(view, view.running)
        if event is not None:
            return event
    return _admit_next(view)


def _prefill_first(view: View) -> ev.Preempted | ev.Scheduled | ev.Admitted | None:
    """Prompts that are half computed, then new ones; who decodes runs in steps without either."""
    if not view.is_open:
        running = view.running
        behind = running[view.num_tokens[running] - view.num_computed[running] > 1]
        event = _schedule_running(view, behind) if len(behind) else None
        if event is not None:
            return event
    event = _admit_next(view)
    if event is None and not view.is_open and len(view.running):
        return _schedule_running(view, view.running)
    return event


class _EncoderDraft:
    """Encoder work that this decision adds: budget, cache room and evictions, tried in order."""

    def __init__(self, view: View):
        self._cache: EncoderCache = view.encoder
        self._split_media = view.config.split_media
        self._ahead = int(bool(view.config.lookahead_tokens))  # a drafter reads one token ahead
        self._compat = view.config.compat == "vllm"
        self._others_run = len(view.running) > 1
        # vLLM cuts right before the item, and drafts for its last token without what comes next.
        self._cut_ahead = 0 if self._compat else self._ahead
        self._left = view.encoder_left
        self._added: dict[bytes, int] = {}
        self._keep: set[bytes] = set()
        self.encode: list[tuple[bytes, int, int]] = []
        self.evict: list[bytes] = []

    def cut(self, known: RequestState, row: int, start: int, length: int) -> int:
        """The chunk [start, start + length) of a request, cut before the first item that does not
        fit; what fits is added to the draft. Gives the length that is left."""
        for index, item in enumerate(known.request.media):
            end = start + length + self._ahead
            if item.end <= start or item.start >= end:
                continue
            if not self._split_media and start + self._ahead < item.start and end < item.end:
                return item.start - start - self._ahead
            first = next((at for at, size in item.runs if at + size > start and at < end), None)
            if first is None:
                continue  # only the text between a video's runs
            if not self._take(known, row, index, item.num_embeds):
                return self._cut_before(first - start)
        return length

    def _cut_before(self, room: int) -> int:
        """Tokens of a chunk that ends before an item `room` tokens away. A drafter reads one token
        ahead; it goes without where waiting for that could last for ever."""
        if room > self._ahead:
            return room - self._cut_ahead
        return 0 if self._compat and self._others_run else max(0, room)

    def _take(self, known: RequestState, row: int, index: int, size: int) -> bool:
        key = known.media_keys[index]
        if index in known.held_media or key in self._added:
            return True
        if self._cache.has(key) and key not in self.evict:
            self._keep.add(key)
            return True
        if size > self._left:
            return False
        room = sum(self._added.values()) - sum(self._cache.entries[gone].size for gone in self.evict)
        evicted = self._cache.evictions_for(size, self._keep.union(self.evict), room)
        if evicted is None:
            return False
        self.evict += evicted
        self._added[key] = size
        self._left -= size
        self.encode.append((key, row, index))
        return True


def _schedule_running(view: View, rows: np.ndarray) -> ev.Preempted | ev.Scheduled | None:
    wanted = view.num_tokens[rows] - view.num_computed[rows]
    if view.config.num_draft_tokens:
        wanted = wanted + view.num_drafts[rows]
        wanted = np.minimum(wanted, view.config.max_model_len - 1 - view.num_computed[rows])
    draft = None
    if len(rows) > view.tokens_left or int(wanted.max()) > 1:
        wanted = _within_limits(view, wanted)
    ahead = bool(view.config.lookahead_tokens)
    media = np.flatnonzero(view.next_media[rows] < view.num_computed[rows] + wanted + ahead)
    if len(media):
        draft = _EncoderDraft(view)
        wanted = _cut_at_media(view, rows, wanted, media, draft)
    wanted = _within_budget(wanted, view.tokens_left)
    if not wanted.all():
        rows, wanted = rows[wanted > 0], wanted[wanted > 0]
    if not len(rows):
        return None
    num_new = int(blocks_needed(view, rows, wanted).sum())
    if num_new > view.blocks.num_free:
        return _preempt(view)
    same = len(rows) == len(view.last_rows) and bool((rows == view.last_rows).all())
    return ev.Scheduled(
        rows=None if same else rows.tobytes(),
        num_tokens=None if int(wanted.max()) == 1 else wanted.tobytes(),
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
    threshold = _threshold(view)
    return np.minimum(wanted, threshold) if threshold else wanted


def _threshold(view: View) -> int:
    """Most tokens of one request in a step, 0 for no limit; a request alone has none to be fair to."""
    return view.config.long_prefill_token_threshold if len(view.requests) > 1 else 0


def _within_budget(wanted: np.ndarray, budget: int) -> np.ndarray:
    """Serve rows in order until the budget is spent; int32 like `wanted`."""
    before = np.cumsum(wanted, dtype=np.int64) - wanted
    return np.clip(budget - before, 0, wanted).astype(np.int32)


def _cut_at_media(
    view: View, rows: np.ndarray, wanted: np.ndarray, media: np.ndarray, draft: _EncoderDraft
) -> np.ndarray:
    """Cut the chunks of rows (places `media` in `rows`) whose next embeddings do not fit."""
    wanted = wanted.copy()
    for place in media.tolist():
        left = max(0, view.tokens_left - int(wanted[:place].sum()))
        row, length = int(rows[place]), min(int(wanted[place]), left)
        start = int(view.num_computed[row])
        wanted[place] = draft.cut(view.requests_by_row[row], row, start, length)
    return wanted


class _Start(NamedTuple):
    """Where a waiting request can start: blocks it shares, tokens whose KV is there or comes with a
    copy, a block to copy from (-1: none), whether its own blocks come back from the host."""

    cached: np.ndarray
    num_computed: int
    copy_from: int = -1
    swap_in: bool = False


def _admit_next(view: View) -> ev.Admitted | None:
    """The first waiting request that can start. One that waits for its grammar, for the encoder, or
    for the prefill that it shares is passed over; one whose blocks do not fit holds back those behind
    it."""
    if not view.free_rows or view.tokens_left <= 0 or (view.preempted_in_step and len(view.running)):
        return None
    for known in view.waiting[view.scan_from :]:
        start = None if known.waits_for_grammar else _start_of(view, known)
        if start is None:
            continue
        length = min(len(known.tokens) - start.num_computed, view.tokens_left)
        if threshold := _threshold(view):
            length = min(length, threshold)
        draft = _EncoderDraft(view)
        length = draft.cut(known, view.free_rows[-1], start.num_computed, length)
        if length:
            return _admission(view, known, start, length, draft)
    return None


def _admission(
    view: View, known: RequestState, start: _Start, length: int, draft: _EncoderDraft
) -> ev.Admitted | None:
    """ADMITTED for a chunk of `length` tokens; None when the blocks are not free."""
    cached = start.cached
    revived = int((view.blocks.references[cached] == 0).sum())
    num_new = _blocks_for(view, start.num_computed + length) - len(cached)
    if max(num_new, _reserved(view, known) - len(cached)) + revived > view.blocks.num_free:
        return None
    new = _next_free(view, cached, revived, num_new)
    return ev.Admitted(
        request_id=known.request.request_id,
        row=view.free_rows[-1],
        num_tokens=length,
        cached_blocks=cached.tobytes(),
        new_blocks=new.tobytes(),
        encode=tuple(draft.encode),
        evict=tuple(draft.evict),
        num_computed=-1 if start.num_computed == len(cached) * view.block_size else start.num_computed,
        copy=(start.copy_from, int(new[0])) if start.copy_from >= 0 else None,
        swap_in=start.swap_in,
    )


def _start_of(view: View, known: RequestState) -> _Start | None:
    """Where the request can start; None while it waits for the prefill of its group."""
    shared = _shared_prompt(view, known)
    if shared is not _ALONE:
        return shared
    cached = _cached_prefix(view, known)
    start = _Start(cached, len(cached) * view.block_size)
    if known.num_swapped > start.num_computed:
        return _Start(cached[:0], known.num_swapped, swap_in=True)
    return start


_ALONE = _Start(np.zeros(0, np.int32), 0)


def _shared_prompt(view: View, known: RequestState) -> _Start | None:
    """The blocks of the request's group, once its prompt is computed: all but the one that holds the
    last prompt token are shared, that one is copied. `_ALONE` when there is nothing to share."""
    leader = view.requests.get(known.request.group)
    if leader is None or leader is known or len(known.tokens) > known.num_prompt:
        return _ALONE
    if not _same_prompt(leader, known):
        return _ALONE
    if leader.row < 0:
        comes_first = leader.arrival < known.arrival and not leader.waits_for_grammar
        return None if comes_first and not leader.cancelled else _ALONE
    before = view.num_computed[leader.row] - view.scheduled[leader.row]
    if before < known.num_prompt or leader.admitted_step == view.step:
        return None  # copies run before this step's own KV, and its swaps in, are there
    last = known.num_prompt - 1
    table, number = view.block_table[leader.row], last // view.block_size
    copied = last % view.block_size > 0
    return _Start(table[:number].copy(), last, int(table[number]) if copied else -1)


def _same_prompt(one: RequestState, other: RequestState) -> bool:
    """Whether the two would fill their prompts' blocks with the same KV, for the same tenant."""
    return (
        one.media_keys == other.media_keys
        and one.request.media == other.request.media
        and one.request.cache_salt == other.request.cache_salt
        and np.array_equal(one.request.prompt_token_ids, other.request.prompt_token_ids)
    )


def _blocks_for(view: View, num_tokens: int) -> int:
    """Blocks that hold so many tokens and the drafter's lookahead."""
    return -(-min(num_tokens + view.config.lookahead_tokens, view.config.max_model_len) // view.block_size)


def _reserved(view: View, known: RequestState) -> int:
    """Blocks that must be free, hits included, before a request starts."""
    match view.config.admission_reserve:
        case "none":
            return 0
        case "prompt":
            return _blocks_for(view, len(known.tokens))
    return _blocks_for(
        view, min(known.num_prompt + known.request.sampling.max_tokens, view.config.max_model_len)
    )


def _next_free(view: View, cached: np.ndarray, revived: int, count: int) -> np.ndarray:
    """`count` free blocks that are not among the hits, which are about to be revived."""
    blocks = view.blocks.free_list.peek(count + revived) if revived else view.blocks.free_list.peek(count)
    return blocks[~np.isin(blocks, cached)][:count] if revived else blocks


def _cached_prefix(view: View, known: RequestState) -> np.ndarray:
    """Blocks whose content is the request's own beginning, int32; at least one token is left to
    compute, for its logits."""
    size = view.block_size
    count = (len(known.tokens) - 1) // size
    if not view.config.enable_prefix_caching or not count:
        return np.zeros(0, np.int32)
    index = view.blocks.index
    tokens = content_windows(known.tokens, 0, count, size, view.content_width)
    parts = index.token_parts(tokens).tolist()
    extras = block_extras(known.request, count * size, size)
    blocks, content = [], ROOT
    for number in range(count):
        block = index.find(content, parts[number], tokens[number], extras.get(number, b""))
        if block < 0:
            break
        blocks.append(block)
        content = int(index.content[block])
    return np.array(blocks, np.int32)
