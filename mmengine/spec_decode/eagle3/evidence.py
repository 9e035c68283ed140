"""Derives a draft head's settings from its tensors, and compares them with config.json.

If config.json does not agree with the tensors, the functions raise a ModelError that names the field.
"""

from typing import Literal

from mmengine.checkpoint.fields import Fields
from mmengine.checkpoint.tensors import TensorEntry
from mmengine.spec_decode.eagle3.config import Target
from mmengine.spec_decode.eagle3.families import Family
from mmengine.spec_decode.eagle3.tensors import EMBEDDING, FC, HEAD, INPUT_NORM, fc_norm


def count_aux_layers(
    family: Family, entries: dict[str, TensorEntry], target: Target, hidden_size: int
) -> int:
    """Return how many of the target's hidden states the fc layer reads."""
    if family.value("target_hidden_size") is not None:
        fields = family.root if family.root.values.get("target_hidden_size") is not None else family.nested
        named = fields.integer("target_hidden_size", 1, 2**17)
        if named != target.hidden_size:
            fields.fail(
                f"{fields.prefix}target_hidden_size is {named}, the target's hidden_size is "
                f"{target.hidden_size}: the head belongs to another model"
            )
    shape = _shape(family, entries, FC)
    if shape[0] != hidden_size:
        fields = family.layer
        fields.fail(f"{fields.prefix}hidden_size is {hidden_size}, but fc.weight gives {shape[0]} values")
    if shape[1] % target.hidden_size:
        family.root.fail(
            f"fc.weight reads {shape[1]} values, no multiple of the target's hidden_size "
            f"{target.hidden_size}: the head belongs to another model"
        )
    return shape[1] // target.hidden_size


def _shape(family: Family, entries: dict[str, TensorEntry], name: str) -> tuple[int, int]:
    entry = entries.get(name)
    if entry is None or len(entry.shape) != 2:
        shape = "missing" if entry is None else f"of shape {list(entry.shape)}"
        family.root.fail(
            f"tensor {name} is {shape}; a matrix is expected, this is not a complete EAGLE-3 head"
        )
    return entry.shape[0], entry.shape[1]


def query_shape(
    family: Family, entries: dict[str, TensorEntry], num_heads: int, num_kv_heads: int
) -> tuple[int, int]:
    """Return the number of rows and columns in the query matrix."""
    fused = "layers.0.self_attn.qkv_proj.weight"
    if fused in entries:
        rows, inputs = _shape(family, entries, fused)
        return rows * num_heads // (num_heads + 2 * num_kv_heads), inputs
    return _shape(family, entries, "layers.0.self_attn.q_proj.weight")


def find_head_dim(layer: Fields, num_heads: int, q_rows: int) -> int:
    head_dim = layer.integer("head_dim", 2, 1024, max(2, q_rows // num_heads))
    if head_dim * num_heads != q_rows or head_dim % 2:
        layer.fail(
            f"{layer.prefix}head_dim {head_dim} with num_attention_heads {num_heads} asks for "
            f"{head_dim * num_heads} rows of q_proj; the tensor has {q_rows}"
        )
    return head_dim


def find_embed_size(family: Family, q_inputs: int, hidden_size: int, shared: int | None) -> int:
    """Return the embedding size.

    `shared` is the target's hidden size if the head uses the target's embedding, else None.
    """
    embed_size = q_inputs - hidden_size
    if embed_size <= 0:
        family.root.fail(
            f"q_proj of the first layer reads {q_inputs} values, not an embedding and a hidden state of "
            f"hidden_size {hidden_size}: this is not an EAGLE-3 head; EAGLE 1 and 2 are not supported"
        )
    if shared is not None and embed_size != shared:
        family.root.fail(
            f"embed_tokens.weight is missing, and the layer reads embeddings of {embed_size} values; those "
            f"of the target have {shared}: the head belongs to another model"
        )
    return embed_size


def find_fc_norms(family: Family, entries: dict[str, TensorEntry]) -> tuple[bool, bool]:
    """Return the settings norm_before_fc and fc_norm."""
    found = []
    for name, tensor in (("norm_before_fc", INPUT_NORM), ("fc_norm", fc_norm(0))):
        said, stored = family.flag(name), tensor in entries
        if said is not None and said != stored:
            has = "hold" if stored else "do not hold"
            family.root.fail(f"{name} is {str(said).lower()}, but the weights {has} {tensor}")
        found.append(stored)
    if all(found):
        family.root.fail("norm_before_fc and fc_norm exclude each other; the weights hold both norms")
    return found[0], found[1]


def has_attention_bias(layer: Fields, entries: dict[str, TensorEntry]) -> bool:
    stored = any(f"layers.0.self_attn.{name}.bias" in entries for name in ("q_proj", "qkv_proj"))
    return stored or layer.flag("attention_bias", False)


def find_head(
    family: Family,
    entries: dict[str, TensorEntry],
    hidden_size: int,
    embed_size: int,
    target: Target,
    whole_vocabulary: bool,
) -> Literal["own", "embedding", "target"]:
    """Return which matrix computes the logits: the head's own lm_head, the head's embedding, or the target's
    lm_head.

    A stored lm_head takes precedence over tie_word_embeddings, because many files have both.
    """
    if HEAD in entries:
        return "own"
    if not whole_vocabulary:
        family.root.fail(f"the weights have no {HEAD}, which a draft_vocab_size of its own needs")
    if EMBEDDING in entries and family.layer.flag("tie_word_embeddings", False) and embed_size == hidden_size:
        return "embedding"
    if hidden_size != target.hidden_size:
        family.root.fail(
            f"the weights have no {HEAD}, and the target's reads {target.hidden_size} values, not "
            f"hidden_size {hidden_size}"
        )
    return "target"
