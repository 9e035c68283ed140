"""The tensors of a Qwen3-VL: which there must be, and a reader of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from mmengine.checkpoint.tensors import check_tensors
from mmengine.models.reader import WHOLE, Part, WeightReader, open_reader
from mmengine.models.sharding import Shard
from mmengine_qwen3_vl.config import ModelConfig, TextConfig, VisionConfig
from mmengine_qwen3_vl.sharding import axis_of, check_plan
from mmengine_qwen3_vl.weights import open_checkpoint

HEAD = "lm_head.weight"


@contextmanager
def open_weights(
    folder: Path, config: ModelConfig, device: torch.device, dtype: torch.dtype, shard: Shard | None = None
) -> Iterator[WeightReader]:
    """A reader of the folder's weights, after every name and shape was found right. ModelError. With a
    `shard` it reads that rank's part."""
    entries = open_checkpoint(folder)
    check_tensors(folder, entries, expected_tensors(config), optional=[HEAD] if config.text.tied else [])
    part = WHOLE
    if shard is not None:
        check_plan(config.text, entries)
        part = Part(shard.rank, shard.size, axis_of)
    with open_reader(entries, device, dtype, part) as reader:
        yield reader


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of the model, by canonical name. Linear weights are [out, in]."""
    shapes = _text_tensors(config.text) | _vision_tensors(config.vision)
    shapes[HEAD] = (config.text.vocab_size, config.text.hidden_size)
    return shapes


def _text_tensors(c: TextConfig) -> dict[str, tuple[int, ...]]:
    q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (c.hidden_size,),
        "self_attn.q_proj.weight": (q_size, c.hidden_size),
        "self_attn.k_proj.weight": (kv_size, c.hidden_size),
        "self_attn.v_proj.weight": (kv_size, c.hidden_size),
        "self_attn.o_proj.weight": (c.hidden_size, q_size),
        "self_attn.q_norm.weight": (c.head_dim,),
        "self_attn.k_norm.weight": (c.head_dim,),
        "post_attention_layernorm.weight": (c.hidden_size,),
        "mlp.gate_proj.weight": (c.intermediate_size, c.hidden_size),
        "mlp.up_proj.weight": (c.intermediate_size, c.hidden_size),
        "mlp.down_proj.weight": (c.hidden_size, c.intermediate_size),
    }
    if c.attention_bias:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            layer[f"self_attn.{name}.bias"] = layer[f"self_attn.{name}.weight"][:1]
    shapes: dict[str, tuple[int, ...]] = {
        "text.embed_tokens.weight": (c.vocab_size, c.hidden_size),
        "text.norm.weight": (c.hidden_size,),
    }
    for i in range(c.num_layers):
        shapes |= {f"text.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def _vision_tensors(c: VisionConfig) -> dict[str, tuple[int, ...]]:
    merged = c.hidden_size * c.merge_size**2
    patch = (c.in_channels, c.temporal_patch_size, c.patch_size, c.patch_size)
    shapes: dict[str, tuple[int, ...]] = {
        "visual.patch_embed.proj.weight": (c.hidden_size, *patch),
        "visual.patch_embed.proj.bias": (c.hidden_size,),
        "visual.pos_embed.weight": (c.num_positions, c.hidden_size),
    }
    block = (
        _affine("norm1", c.hidden_size)
        | _affine("norm2", c.hidden_size)
        | _affine("attn.qkv", 3 * c.hidden_size, c.hidden_size)
        | _affine("attn.proj", c.hidden_size, c.hidden_size)
        | _affine("mlp.linear_fc1", c.intermediate_size, c.hidden_size)
        | _affine("mlp.linear_fc2", c.hidden_size, c.intermediate_size)
    )
    for i in range(c.depth):
        shapes |= {f"visual.blocks.{i}.{name}": shape for name, shape in block.items()}
    mergers = [("visual.merger", c.hidden_size)]
    mergers += [(f"visual.deepstack_merger_list.{i}", merged) for i in range(len(c.deepstack_layers))]
    for name, norm_size in mergers:
        shapes |= _affine(f"{name}.norm", norm_size)
        shapes |= _affine(f"{name}.linear_fc1", merged, merged)
        shapes |= _affine(f"{name}.linear_fc2", c.out_hidden_size, merged)
    return shapes


def _affine(name: str, out: int, *inputs: int) -> dict[str, tuple[int, ...]]:
    """A weight with its bias: of a linear layer, or of a layer norm (no `inputs`)."""
    return {f"{name}.weight": (out, *inputs), f"{name}.bias": (out,)}
