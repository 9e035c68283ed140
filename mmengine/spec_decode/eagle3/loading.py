"""Reads and checks a draft head's configuration and tensor shapes, without reading the weights. config.json
and the tensors must agree.

Settings that are missing in config.json are derived from the tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mmengine.checkpoint.fields import Fields
from mmengine.checkpoint.files import read_json
from mmengine.checkpoint.rope import read_rope
from mmengine.checkpoint.tensors import TensorEntry, check_tensors
from mmengine.errors import ConfigError, shown
from mmengine.spec_decode.eagle3.aux_layers import aux_layers
from mmengine.spec_decode.eagle3.config import MAX_DRAFTS, HeadConfig, Target
from mmengine.spec_decode.eagle3.evidence import (
    count_aux_layers,
    find_embed_size,
    find_fc_norms,
    find_head,
    find_head_dim,
    has_attention_bias,
    query_shape,
)
from mmengine.spec_decode.eagle3.families import Family, recognise
from mmengine.spec_decode.eagle3.tensors import (
    EMBEDDING,
    TO_DRAFT,
    TO_TARGET,
    expected_tensors,
    open_head_tensors,
    target_ids,
)

MAX_CONFIG_BYTES = 2**20  # maximum size of a head's config.json in bytes
MAX_LAYERS = 8
DEFAULT_DRAFTS = 4


@dataclass(frozen=True, slots=True)
class HeadFolder:
    """A head's configuration, and where its tensors are stored.

    `target_ids` (int64 [draft_vocab_size]) maps the head's token ids to the target's. None: the ids are
    equal.
    """

    config: HeadConfig
    entries: dict[str, TensorEntry]
    target_ids: np.ndarray | None


def open_head(
    folder: Path, target: Target, *, aux_layers: Sequence[int] | None = None, num_drafts: int | None = None
) -> HeadFolder:
    """Read and check a head without reading its weights.

    `aux_layers` replaces the auxiliary layers from config.json. An entry i selects the hidden states that
    enter layer i. Raises ModelError if the folder is invalid or does not fit the target, and ConfigError if
    `num_drafts` is not between 0 and 7.
    """
    path = folder / "config.json"
    family = recognise(Fields(read_json(path, max_bytes=MAX_CONFIG_BYTES), path, ""))
    entries = open_head_tensors(folder)
    config = _resolve(family, entries, target, aux_layers, num_drafts)
    maps = {TO_TARGET, TO_DRAFT}
    weights = {name: entry for name, entry in entries.items() if name not in maps}
    if "mask_hidden" in weights:
        family.root.fail(
            "the weights have mask_hidden: a head that drafts in parallel, which is not supported"
        )
    check_tensors(folder, weights, expected_tensors(config, entries))
    return HeadFolder(config, weights, target_ids(entries, config.draft_vocab_size, config.vocab_size))


def _resolve(
    family: Family,
    entries: dict[str, TensorEntry],
    target: Target,
    chosen_aux_layers: Sequence[int] | None,
    num_drafts: int | None,
) -> HeadConfig:
    layer = family.layer
    _refuse(family)
    hidden_size = layer.integer("hidden_size", 1, 2**17)
    num_heads = layer.integer("num_attention_heads", 1, 1024)
    num_kv_heads = layer.integer("num_key_value_heads", 1, 1024, num_heads)
    if num_heads % num_kv_heads:
        layer.fail(f"{layer.prefix}num_key_value_heads: {num_heads} heads cannot be shared by {num_kv_heads}")
    num_aux_layers = count_aux_layers(family, entries, target, hidden_size)
    q_rows, q_inputs = query_shape(family, entries, num_heads, num_kv_heads)
    head_dim = find_head_dim(layer, num_heads, q_rows)
    vocab_size = _match(family, layer, "vocab_size", target.vocab_size)
    draft_vocab_size = vocab_size
    if family.root.values.get("draft_vocab_size") is not None:
        draft_vocab_size = family.root.integer("draft_vocab_size", 1, vocab_size)
    own_embedding = EMBEDDING in entries
    embed_size = find_embed_size(family, q_inputs, hidden_size, None if own_embedding else target.hidden_size)
    whole, each = find_fc_norms(family, entries)
    return HeadConfig(
        family=family.name,
        hidden_size=hidden_size,
        target_hidden_size=target.hidden_size,
        embed_size=embed_size,
        intermediate_size=layer.integer("intermediate_size", 1, 2**20),
        num_layers=layer.integer("num_hidden_layers", 1, MAX_LAYERS, 1),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        aux_layers=aux_layers(family, num_aux_layers, target.num_layers, chosen_aux_layers),
        rms_norm_eps=layer.number("rms_norm_eps", 1e-6),
        rope=read_rope(layer, head_dim),
        norm_before_fc=whole,
        fc_norm=each,
        norm_before_residual=_either(family.flag("norm_before_residual"), family.norm_before_residual),
        norm_output=_either(family.flag("norm_output"), False),
        qk_norm=family.qk_norm or "layers.0.self_attn.q_norm.weight" in entries,
        attention_bias=has_attention_bias(layer, entries),
        own_embedding=own_embedding,
        head=find_head(family, entries, hidden_size, embed_size, target, draft_vocab_size == vocab_size),
        num_drafts=_num_drafts(family, num_drafts),
    )


def _refuse(family: Family) -> None:
    layer = family.layer
    if layer.values.get("hidden_act") not in (None, "silu"):
        layer.fail(
            f"{layer.prefix}hidden_act {shown(layer.values['hidden_act'])} is not supported, only silu"
        )
    for name in ("mlp_bias", "use_sliding_window"):
        if layer.flag(name, False):
            layer.fail(f"{layer.prefix}{name} is true, which is not supported")


def _match(family: Family, fields: Fields, name: str, wanted: int) -> int:
    value = fields.integer(name, 1, 2**22)
    if value != wanted:
        fields.fail(
            f"{fields.prefix}{name} is {value}, the target's is {wanted}: the head belongs to another model"
        )
    return value


def _num_drafts(family: Family, asked: int | None) -> int:
    """Check and return `asked`. If `asked` is None, return config.json's number (default DEFAULT_DRAFTS), but
    at most MAX_DRAFTS.
    """
    if asked is not None:
        if isinstance(asked, bool) or not isinstance(asked, int) or not 0 <= asked <= MAX_DRAFTS:
            raise ConfigError(f"num_drafts is {shown(asked)}; a chain has 0 to {MAX_DRAFTS} drafts")
        return asked
    settings = family.root.child("speculators_config", optional=True)
    methods = settings.values.get("proposal_methods")
    if methods is None:
        return DEFAULT_DRAFTS
    prefix = f"{settings.prefix}proposal_methods"
    if not isinstance(methods, list) or not methods or not all(isinstance(one, dict) for one in methods):
        settings.fail(f"{prefix} must be a list of objects")
    default = settings.values.get("default_proposal_method")
    method = next((one for one in methods if one.get("proposal_type") == default), methods[0])
    fields = Fields(method, settings.path, f"{prefix}: ")
    return min(fields.integer("speculative_tokens", 1, 1024, DEFAULT_DRAFTS), MAX_DRAFTS)


def _either(said: bool | None, default: bool) -> bool:
    return default if said is None else said
