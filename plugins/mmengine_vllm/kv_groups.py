"""Converts vLLM's KV cache groups to a text in a log's first event (STARTED), and back.

Only models with several groups, or with a group that is not full attention, need the text. If mmengine
supports all groups of the model, the setting `block_groups` also describes the groups, and the log contains
the blocks of every group.
"""

import json
from collections.abc import Iterable, Sequence
from itertools import chain

from mmengine.block_groups import MAX_GROUPS, BlockGroup, longest_row
from mmengine.errors import LogError
from mmengine_vllm.vllm_object import VllmObject, read

KV_SPECS = "kv_specs"
_KINDS = (
    *("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "SlidingWindowMLASpec"),
    *("ChunkedLocalAttentionSpec", "MambaSpec", "SinkFullAttentionSpec"),
)
_FIELDS = (
    *("block_size", "num_kv_heads", "head_size", "head_size_v", "dtype", "sliding_window"),
    *("attention_chunk_size", "shapes", "dtypes", "page_size_padded", "mamba_cache_mode", "sink_len"),
    *("num_speculative_blocks", "num_prefill_checkpoint_blocks", "prefill_checkpoint_alignment"),
)
MAX_WINDOW = 2**24  # The largest window that the setting `block_groups` allows.
Group = tuple[str, dict[str, VllmObject]]


def described_groups(groups: VllmObject) -> str:
    """Return KV groups as JSON: a list of [class, fields]."""
    described = []
    for group in groups:
        spec = getattr(group, "kv_cache_spec", None)
        fields = {name: getattr(spec, name) for name in _FIELDS if getattr(spec, name, None) is not None}
        plain = {name: _plain(value) for name, value in fields.items()}
        described.append((type(spec).__name__, plain))
    return json.dumps(described, separators=(",", ":"))


def _plain(value: VllmObject) -> VllmObject:
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if isinstance(value, (int, str)) else str(value)


def full_attention_group(scheduler: VllmObject) -> int:
    """Return the index of the KV group whose blocks are recorded: the first full-attention group, or 0."""
    kinds = [type(spec).__name__ for spec in specs_of(scheduler)]
    return next((number for number, kind in enumerate(kinds) if "FullAttention" in kind or "MLA" in kind), 0)


def specs_of(scheduler: VllmObject) -> list[VllmObject]:
    """Return the spec of each of the scheduler's KV groups."""
    groups = read(scheduler, "kv_cache_config.kv_cache_groups", ())
    return [read(group, "kv_cache_spec") for group in groups]


def block_groups_of(scheduler: VllmObject) -> tuple[BlockGroup, ...]:
    """Return the setting `block_groups` for several KV groups, in vLLM's order.

    Returns () if there is only one group, if mmengine does not support the groups, if vLLM uses lookahead
    slots, EAGLE or a retention interval, or if the KV pool is too small for the longest request.
    """
    specs = specs_of(scheduler)
    windows = [_window(spec, scheduler.block_size) for spec in specs]
    sparse = read(scheduler, "kv_cache_config.prefix_cache_retention_interval") is not None
    is_drafting = bool(read(scheduler, "num_lookahead_tokens", 0)) or bool(read(scheduler, "use_eagle"))
    if not 1 < len(specs) <= MAX_GROUPS or None in windows or 0 not in windows or sparse or is_drafting:
        return ()
    groups = tuple(BlockGroup(window=window or 0) for window in windows)
    num_blocks, budget = scheduler.kv_cache_config.num_blocks - 1, scheduler.max_num_scheduled_tokens
    longest = longest_row(groups, num_blocks, scheduler.block_size, budget)
    return groups if scheduler.max_model_len <= longest else ()


def is_full_attention(spec: VllmObject) -> bool:
    """Return whether a KV group has full attention."""
    return type(spec).__name__ in ("FullAttentionSpec", "MLAAttentionSpec")


def _window(spec: VllmObject, block_size: int) -> int | None:
    """Return the length of a KV group's window, 0 for full attention, or None for any other group."""
    if read(spec, "block_size") != block_size:
        return None
    if is_full_attention(spec):
        return 0
    is_window = type(spec).__name__ in ("SlidingWindowSpec", "SlidingWindowMLASpec")
    window = int(read(spec, "sliding_window", 0))
    is_window = is_window and 1 < window <= MAX_WINDOW and not read(spec, "extra_retained_tokens", 0)
    return window if is_window else None


def by_number(given: Iterable[Sequence[Sequence[int]]], groups: tuple[int, ...]) -> list[int]:
    """Return requests' new blocks in the log's order: by request, then by place in the table, then by group.
    `given`: for each request, the new blocks of each KV group.
    """
    return [
        block
        for blocks in given
        for block in chain.from_iterable(zip(*(blocks[group] for group in groups), strict=True))
    ]


def split_blocks(
    blocks: Sequence[list[int]], hits: int, groups: tuple[int, ...]
) -> tuple[list[int], list[int]]:
    """Return an admitted request's blocks in the log's order, as (prefix hits, new blocks).

    `blocks`: the blocks of each KV group, with 0 for blocks before a window. `hits`: number of prefix hits in
    a group, including these zeros. `groups`: the recorded KV groups.
    """
    if len(groups) == 1:
        table = blocks[groups[0]]
        return table[:hits], table[hits:]
    cached = [block for group in groups for block in blocks[group][:hits] if block]
    return cached, by_number([[table[hits:] for table in blocks]], groups)


def groups_of(text: str) -> list[Group]:
    """Return the KV groups in the text from `described_groups`. Raises LogError for any other text."""
    try:
        found = json.loads(text)
        groups = [(str(kind), dict(fields)) for kind, fields in found]
    except (ValueError, TypeError) as error:
        raise LogError(f"STARTED has invalid KV groups: {text[:80]!r}") from error
    for kind, fields in groups:
        if kind not in _KINDS or not fields.keys() <= {*_FIELDS}:
            raise LogError(f"STARTED has a KV group of the unknown kind {kind[:80]!r} or unknown fields")
    if not 0 < len(groups) <= MAX_GROUPS:
        raise LogError(f"STARTED has {len(groups)} KV groups; 1 to {MAX_GROUPS} are allowed")
    return groups
