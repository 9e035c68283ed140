"""Random settings and requests for the simulated executor. The tests in core and replay share this module."""

import random
from collections import deque
from dataclasses import replace

import msgspec
import numpy as np

from mmengine.block_groups import BlockGroup
from mmengine.config import EngineConfig
from mmengine.core.executor import Executor, StepPlan, StepResult
from mmengine.core.state.state import State
from mmengine.replay.invariants import find_broken
from mmengine.request import Adapter, GrammarRequest, MediaItem, Request, SamplingParams

# With some values of lora_bytes, only one or two of these adapters fit.
ADAPTERS = (
    None,
    *(Adapter(bytes([n]) * 32, 100, visual=n == 2, name=f"adapter {n}") for n in (1, 2, 3)),
)
GRAMMAR_ROWS = (
    # This grammar is so long that the log stores the grammar in a slot.
    GrammarRequest("lark", 'start: "a"' + 100 * ' "b"', (7, 9)),
    GrammarRequest("regex", "a", on_truncation="close"),  # truncated answers are completed
)


def small_config(rng: random.Random) -> EngineConfig:
    """Return settings so small that budgets split prompts, the pool runs out of blocks, and caches evict."""
    block_size = rng.choice([1, 2, 4, 8, 16])
    max_model_len = rng.randint(8, 96)
    blocks_each = -(-max_model_len // block_size)
    max_num_seqs = rng.randint(1, 6)
    compat = rng.choice(["", "", "vllm"])
    num_draft_tokens = rng.choice([0, 0, 1, 3])
    config = EngineConfig(
        max_num_seqs=max_num_seqs,
        token_budget=rng.randint(max(max_num_seqs, block_size, 4), 40),
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=1 + blocks_each + rng.randint(0, 2 * blocks_each),
        enable_prefix_caching=rng.random() < 0.8,
        long_prefill_token_threshold=(threshold := rng.choice([0, 0, 3, 7])),
        encoder_budget=rng.randint(4, 16),
        encoder_cache_size=rng.randint(4, 24),
        split_media=(split_media := rng.random() < 0.8),
        max_item_embeds=0 if split_media or compat else 3 if threshold == 3 else 4,
        policy=rng.choice(["fcfs", "priority"] if compat else ["fcfs", "priority", "prefill_first"]),
        swap_blocks=(swap_blocks := 0 if compat else rng.choice([0, 0, 3, 40])),
        preempt_mode=rng.choice(["auto", "swap"] if swap_blocks else ["auto", "recompute"]),
        admission_reserve=rng.choice(["none", "prompt"] if compat else ["none", "prompt", "output"]),
        num_draft_tokens=num_draft_tokens,
        draft_policy="goodput" if num_draft_tokens and not compat and max_model_len % 2 else "auto",
        drafts_for=rng.choice(["all", "all", "forms"]),
        max_in_flight=1 if compat else rng.choice([1, 2]),
        lookahead_tokens=num_draft_tokens * rng.randint(0, 1),
        compat=compat,
        max_waiting=rng.choice([2, 8, 64]),
        max_retries=rng.randint(0, 2),
        checkpoint_interval=rng.choice([1, 4, 16]),
        # An image has 4 units of work, a video up to 12.
        encoder_piece=0 if compat else (0, 1, 2, 4, 8)[max_model_len % 5],
        num_state_slots=0
        if compat or swap_blocks
        else (0, 1, max_num_seqs, max_num_seqs + 1, max_num_seqs + 4)[max_model_len % 5],
        snapshot_every=(0, 8, 256)[max_model_len % 3],
        max_loras=(0, 0, 1, 2)[max_model_len % 4],
        lora_bytes=(100, 250, 400)[max_model_len % 3],
    )
    if compat or config.num_state_slots or config.lookahead_tokens:
        return config
    # A quarter of these settings never splits a run of embeddings. Another quarter never splits a prompt.
    match config.num_blocks % 4:
        case 1:
            return msgspec.structs.replace(config, atomic_runs=True)
        case 2:
            return msgspec.structs.replace(config, whole_prompt=True, encoder_piece=0)
    return config


def with_windows(config: EngineConfig, seed: int) -> EngineConfig | None:
    """Return `config` with one to three window groups, and a pool that fits the longest request. Returns None
    if the settings do not support block groups.
    """
    if config.compat or config.num_state_slots or config.lookahead_tokens:
        return None
    rng = random.Random(seed)
    windows = sorted(rng.choice([1, 2, 5, 9, 24, 200]) for _ in range(rng.randint(1, 3)))
    groups = (BlockGroup(0, (0,)), *(BlockGroup(window, (1 + n,)) for n, window in enumerate(windows)))
    return _with_groups(config, groups, rng)


def with_uniform_window(config: EngineConfig, seed: int) -> EngineConfig | None:
    """Return `config` with a window in all layers, and a pool that fits the longest request. Returns None if
    the settings do not support block groups.
    """
    if config.compat or config.num_state_slots or config.lookahead_tokens:
        return None
    rng = random.Random(seed)
    return _with_groups(config, (BlockGroup(rng.choice([2, 3, 5, 9, 24, 60]), (0, 1)),), rng)


def _with_groups(config: EngineConfig, groups: tuple[BlockGroup, ...], rng: random.Random) -> EngineConfig:
    preempt_mode = "auto" if config.preempt_mode == "swap" else config.preempt_mode
    config = msgspec.structs.replace(
        config, block_groups=groups, swap_blocks=0, preempt_mode=preempt_mode, num_blocks=2
    )
    least = config.most_blocks(config.max_model_len)
    return msgspec.structs.replace(config, num_blocks=1 + least + rng.choice([0, 0, 1, least // 2, least]))


def longest_chunk(config: EngineConfig) -> int:
    """Return the largest number of tokens that a step computes for one request."""
    return min(config.token_budget, config.long_prefill_token_threshold or config.token_budget)


def small_request(
    rng: random.Random, name: str, config: EngineConfig, grammars: float = 0.0, like: Request | None = None
) -> Request:
    """Return a random request that fits `config`, often with media and a prefix that other requests share.
    `like`: an earlier request. The result is sometimes a further choice for the earlier request's prompt.
    """
    length = rng.randint(1, config.max_model_len - 1)
    if config.whole_prompt:
        length = min(length, longest_chunk(config))
    prompt = np.array([rng.randrange(3) for _ in range(length)], np.int32)
    shared = rng.randrange(3)
    prompt[: length // 2] = shared
    sampling = SamplingParams(
        max_tokens=rng.randint(1, 40), min_tokens=rng.choice([0, 1]), seed=1, ignore_eos=rng.random() < 0.3
    )
    if like is not None and rng.random() < 0.3:
        plain = replace(like, request_id=name, sampling=sampling, outputs=np.zeros(0, np.int32))
        return replace(plain, sample_index=1, group=like.request_id)
    drawn_adapter = ADAPTERS[(length + shared) % len(ADAPTERS)] if config.max_loras else None
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        sampling=sampling,
        media=tuple(_media(rng, length, config)),
        sample_index=rng.choice([0, 0, 1]),
        priority=rng.randint(-1, 1),
        cache_salt=rng.choice(["", "", "tenant"]),
        adapter=drawn_adapter,
        tenant=("", "one", "two")[(length + 2 * shared) % 3] if config.max_model_len % 2 else "",
        grammar=None if (drawn := rng.random()) >= grammars else GRAMMAR_ROWS[drawn < grammars / 2],
    )


def _media(rng: random.Random, length: int, config: EngineConfig) -> list[MediaItem]:
    """Return random images and videos in prompt order. A video's runs have text between them."""
    items, place = [], 0
    longest = min(8, longest_chunk(config)) if config.atomic_runs else 8
    budget = min(config.encoder_budget, config.encoder_cache_size)
    most_runs = [1, 1, 3] if config.split_media or config.compat else [1]
    while rng.random() < 0.6 and len(items) < 3:
        runs, left = [], config.largest_item
        if config.whole_prompt:
            left = min(left, budget - sum(item.num_embeds for item in items))
            if not left:
                break
        for _ in range(rng.choice(most_runs)):
            start = place + rng.randint(0, 4)
            size = rng.randint(1, max(1, min(left, longest)))
            if start + size > length or size > left:
                break
            runs.append((start, size))
            place, left = start + size, left - size
        if not runs:
            break
        sizes = bytes(size for _, size in runs)  # items with equal hashes must have equal sizes
        mm_hash = (bytes([rng.randrange(3)]) + sizes).ljust(32, b"\0")
        grid = (len(runs), 2, 2)
        items.append(MediaItem(mm_hash, "image" if len(runs) == 1 else "video", tuple(runs), grid))
    return items


def check_invariants(state: State) -> None:
    """Assert the invariants that hold between any two events."""
    found = find_broken(state)
    assert found is None, found


class Watched:
    """An executor that checks the plans in flight at each dispatch and collect. A plan's blocks must not be
    free or overwritten by later steps. A plan's features must be in the encoder cache.
    """

    needs_plan = True

    def __init__(self, inner: Executor):
        self.inner, self.plans = inner, deque()
        self.state: State | None = None

    def dispatch(self, plan: StepPlan) -> None:
        tables = self.state.block_table[plan.rows, : plan.block_table.shape[1]]
        assert (plan.block_table == tables).all(), "the plan has its rows' block tables"
        new = set(plan.block_table.ravel().tolist()) - {0}
        for group, window in enumerate(plan.windows):
            new |= self._read_blocks(plan, group, window.block_table)
        self.plans.append((plan, new))
        self.check()
        self.inner.dispatch(plan)

    def _read_blocks(self, plan: StepPlan, group: int, table: np.ndarray) -> set[int]:
        """Return the blocks that the plan reads or writes in a group with a window."""
        first = self.state.windows.first_needed(plan.num_computed)[group]
        held = np.arange(table.shape[1]) >= first[:, None]
        held &= np.arange(table.shape[1]) < self.state.num_blocks[plan.rows][:, None]
        assert (table[held] != 0).all(), "a group with a window has the blocks that a step reads"
        return set(table[held].tolist())

    def collect(self) -> StepResult:
        self.check()
        self.plans.popleft()
        return self.inner.collect()

    def discard(self) -> None:
        self.plans.clear()
        self.inner.discard()

    def close(self) -> None:
        self.inner.close()

    def check(self) -> None:
        free = set(self.state.blocks.free_list.order().tolist())
        for number, (plan, blocks) in enumerate(self.plans):
            assert not blocks & free, "a block that a step in flight reads is not free"
            features = {span.key for span in plan.media}
            assert features <= set(self.state.encoder.entries), "a feature in use stays"
            for later, _ in list(self.plans)[number + 1 :]:
                assert not features & set(later.evict), "a feature in use is not dropped"
                written = set((later.slot_mapping // self.state.block_size).tolist())
                owners = {row: set(plan.block_table[n].tolist()) for n, row in enumerate(plan.rows.tolist())}
                for n, row in enumerate(later.rows.tolist()):
                    own = set(later.block_table[n].tolist()) & written
                    others = set().union(*(held for other, held in owners.items() if other != row)) - {0}
                    shared = {block for block in own & others if self.state.blocks.references[block] > 1}
                    assert not (own & others) - shared, (
                        "no later step writes to a block that a step in flight reads"
                    )
