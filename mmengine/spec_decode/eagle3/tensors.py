"""Finds a draft head's tensors in published files, lists their required shapes, and reads the vocabulary map.

The vocabulary map says which tokens of the target the head can draft.
"""

import re
from pathlib import Path

import numpy as np

from mmengine.checkpoint.files import read_range
from mmengine.checkpoint.tensors import FLOAT_BYTES, INDEX_FILE, SINGLE_FILE, TensorEntry, open_tensors
from mmengine.errors import ModelError
from mmengine.spec_decode.eagle3.config import HeadConfig

EMBEDDING, HEAD, FC, FC_BIAS, NORM = (
    "embed_tokens.weight",
    "lm_head.weight",
    "fc.weight",
    "fc.bias",
    "norm.weight",
)
INPUT_NORM = "input_norm.weight"  # the norm over all auxiliary states
TO_TARGET, TO_DRAFT = "d2t", "t2d"
QKV = ("q_proj", "k_proj", "v_proj")
# The dtypes after FLOAT_BYTES occur only in vocabulary maps.
DTYPE_BYTES = {**FLOAT_BYTES, "I64": 8, "I32": 4, "BOOL": 1, "U8": 1}
_MAP_DTYPES: dict[str, np.dtype] = {
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "BOOL": np.dtype("u1"),
    "U8": np.dtype("u1"),
}

_DERIVED = re.compile(
    r"rotary(?:_emb)?\.inv_freq$|^verifier_"
)  # tensors that are not read: constants, and copies of the target's tensors
_NAMES = (
    (re.compile(r"^midlayer\."), "layers.0."),
    (re.compile(r"^aux_norm_low\."), "fc_norm.0."),
    (re.compile(r"^aux_norm_mid\."), "fc_norm.1."),
    (re.compile(r"^aux_norm_high\."), "fc_norm.2."),
    (re.compile(r"^d2t\.weight$"), TO_TARGET),
)


def open_head_tensors(folder: Path) -> dict[str, TensorEntry]:
    """Return all tensors of the head by canonical name.

    Raises ModelError if the weights are missing, damaged or pickled.
    """
    if not any((folder / name).is_file() for name in (SINGLE_FILE, INDEX_FILE)):
        pickles = sorted(path.name for path in folder.glob("*.bin"))[:1]
        if pickles:
            raise ModelError(
                f"{folder / pickles[0]} is a pickle, which is never loaded; convert it to "
                "safetensors on a machine where you trust it, with save_file of safetensors.torch: "
                f"save_file(torch.load('{pickles[0]}', weights_only=True), '{SINGLE_FILE}')"
            )
    return open_tensors(folder, canonical_name, DTYPE_BYTES)


def canonical_name(stored: str) -> str | None:
    """Return the canonical name for a tensor's name in a file, or None for a tensor that is not read."""
    name = stored.removeprefix("model.")
    if _DERIVED.search(name):
        return None
    for pattern, replacement in _NAMES:
        name = pattern.sub(replacement, name)
    return name


def expected_tensors(config: HeadConfig, stored: dict[str, TensorEntry]) -> dict[str, tuple[int, ...]]:
    """Return {name: shape} for all tensors that the head must have. Linear layers are [out, in].

    Biases and fused tensors (qkv_proj, gate_up_proj) are included if the file stores them.
    """
    c, h = config, config.hidden_size
    aux_hidden_states = len(c.aux_layers)
    shapes: dict[str, tuple[int, ...]] = {FC: (h, aux_hidden_states * c.target_hidden_size), NORM: (h,)}
    if FC_BIAS in stored:
        shapes[FC_BIAS] = (h,)
    if c.norm_before_fc:
        shapes[INPUT_NORM] = (aux_hidden_states * c.target_hidden_size,)
    if c.fc_norm:
        shapes |= {fc_norm(i): (c.target_hidden_size,) for i in range(aux_hidden_states)}
    if c.own_embedding:
        shapes[EMBEDDING] = (c.vocab_size, c.embed_size)
    if c.head == "own":
        shapes[HEAD] = (c.draft_vocab_size, h)
    for layer in range(c.num_layers):
        shapes |= _layer(c, layer, stored)
    return shapes


def fc_norm(aux_layer: int) -> str:
    return f"fc_norm.{aux_layer}.weight"


def _layer(c: HeadConfig, layer: int, stored: dict[str, TensorEntry]) -> dict[str, tuple[int, ...]]:
    h, prefix = c.hidden_size, f"layers.{layer}."
    norms = {"input_layernorm": c.embed_size if layer == 0 else h, "post_attention_layernorm": h}
    # Only the first layer uses the norm of the fused states, but some files have it for other layers too.
    if layer == 0 or f"{prefix}hidden_norm.weight" in stored:
        norms["hidden_norm"] = h
    if c.qk_norm:
        norms |= {"self_attn.q_norm": c.head_dim, "self_attn.k_norm": c.head_dim}
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}{name}.weight": (n,) for name, n in norms.items()}
    inputs = c.embed_size + h if layer == 0 else h
    heads = {"q_proj": c.num_heads, "k_proj": c.num_kv_heads, "v_proj": c.num_kv_heads}
    linears = joined(
        "self_attn.qkv_proj", {f"self_attn.{n}": m * c.head_dim for n, m in heads.items()}, prefix, stored
    )
    for name, outputs in linears.items():
        shapes[f"{prefix}{name}.weight"] = (outputs, inputs)
        if c.attention_bias:
            shapes[f"{prefix}{name}.bias"] = (outputs,)
    shapes[f"{prefix}self_attn.o_proj.weight"] = (h, c.num_heads * c.head_dim)
    if f"{prefix}self_attn.o_proj.bias" in stored:
        shapes[f"{prefix}self_attn.o_proj.bias"] = (h,)
    wide = joined(
        "mlp.gate_up_proj",
        dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), c.intermediate_size),
        prefix,
        stored,
    )
    shapes |= {f"{prefix}{name}.weight": (outputs, h) for name, outputs in wide.items()}
    shapes[f"{prefix}mlp.down_proj.weight"] = (h, c.intermediate_size)
    return shapes


def joined(fused: str, parts: dict[str, int], prefix: str, stored: dict[str, TensorEntry]) -> dict[str, int]:
    """Return {name: row count} for the tensors `parts`. If the file stores a fused tensor instead, return the
    fused tensor's name and row count.
    """
    return {fused: sum(parts.values())} if f"{prefix}{fused}.weight" in stored else parts


def target_ids(stored: dict[str, TensorEntry], draft_vocab_size: int, vocab_size: int) -> np.ndarray | None:
    """Return, as int64 [draft_vocab_size], the target's id for each token of the head.

    Returns None if head and target have equal vocabularies.

    d2t has offsets: the head's token j is the target's token j + d2t[j]. t2d says for each target token
    whether the head has the token, and must agree with d2t. Raises ModelError.
    """
    entry = stored.get(TO_TARGET)
    if entry is None:
        if draft_vocab_size != vocab_size:
            raise ModelError(
                f"the weights have no tensor {TO_TARGET}, which is needed because the head has only "
                f"{draft_vocab_size} of the target's {vocab_size} tokens (draft_vocab_size)"
            )
        return None
    ids = np.arange(draft_vocab_size, dtype=np.int64) + _map(entry, draft_vocab_size, ("I64", "I32"))
    if not ((ids >= 0) & (ids < vocab_size)).all() or not (np.diff(ids) > 0).all():
        raise ModelError(
            f"{entry.path}: {entry.stored_name} must hold offsets (target id minus draft id) that lead to "
            f"ascending ids below the target's vocabulary size {vocab_size}"
        )
    has = stored.get(TO_DRAFT)
    if has is not None and not np.array_equal(np.flatnonzero(_map(has, vocab_size, ("BOOL", "U8"))), ids):
        raise ModelError(f"{has.path}: {has.stored_name} and {entry.stored_name} name different tokens")
    return None if draft_vocab_size == vocab_size else ids


def _map(entry: TensorEntry, length: int, dtypes: tuple[str, ...]) -> np.ndarray:
    if entry.shape != (length,) or entry.dtype not in dtypes:
        raise ModelError(
            f"{entry.path}: {entry.stored_name} is {entry.dtype} {list(entry.shape)}; [{length}] of "
            f"{' or '.join(dtypes)} is expected"
        )
    data = read_range(entry.path, entry.start, entry.num_bytes, f"tensor {entry.stored_name}")
    return np.frombuffer(data, _MAP_DTYPES[entry.dtype])
