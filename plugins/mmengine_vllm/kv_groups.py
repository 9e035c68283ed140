"""Writes KV groups as a text into the fingerprints of STARTED, and reads this text.

Only models with several groups, or with a group that is not full attention, need the text.
"""

import json

from mmengine.errors import LogError
from mmengine_vllm.vllm_object import VllmObject

KV_SPECS = "kv_specs"
MAX_GROUPS = 64
_KINDS = (
    *("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "SlidingWindowMLASpec"),
    *("ChunkedLocalAttentionSpec", "MambaSpec", "SinkFullAttentionSpec"),
)
_FIELDS = (
    *("block_size", "num_kv_heads", "head_size", "head_size_v", "dtype", "sliding_window"),
    *("attention_chunk_size", "shapes", "dtypes", "page_size_padded", "mamba_cache_mode", "sink_len"),
    *("num_speculative_blocks", "num_prefill_checkpoint_blocks", "prefill_checkpoint_alignment"),
)
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


def groups_of(text: str) -> list[Group]:
    """Return the KV groups in a text that `described_groups` wrote. Raises LogError for any other text."""
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
