"""Initialises a draft head with the weights of the target's last layer, where shapes are equal."""

import torch
from torch import Tensor

from mmengine_shapes.training.head_model import DraftHead, HeadShape
from mmengine_shapes.training.head_target import Target, stored

NOISE = 0.02
EMBEDDING = "text.embed_tokens.weight"
PROJECTIONS = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
NORMS = ("self_attn.q_norm", "self_attn.k_norm", "input_layernorm", "post_attention_layernorm")


@torch.no_grad()
def start_head(target: Target, shape: HeadShape, vocabulary: Tensor) -> DraftHead:
    """Return a head that begins as the target's last layer, applied to the highest auxiliary state.

    The weights that read the embedding or the lower states begin as noise. The head has no q and k norms, so
    the target's norm weights are multiplied into the projections.
    """
    config = target.config.text
    embedding, final_norm = stored(target.folder, EMBEDDING, "text.norm.weight")
    head = DraftHead(config, shape, embedding)
    names = [*PROJECTIONS, *NORMS]
    last = (f"text.layers.{config.num_layers - 1}.{name}.weight" for name in names)
    weights = dict(zip(names, stored(target.folder, *last), strict=True))
    hidden = config.hidden_size
    layer = head.midlayer
    for name, norm in (("q_proj", "self_attn.q_norm"), ("k_proj", "self_attn.k_norm"), ("v_proj", "")):
        weight = getattr(layer.self_attn, name).weight.normal_(std=NOISE)
        full = weights[f"self_attn.{name}"].view(-1, config.head_dim, hidden)
        scale = weights[norm][:, None] if norm else 1.0
        weight[:, hidden:] += (full * scale).flatten(0, 1)
    layer.self_attn.o_proj.weight.copy_(weights["self_attn.o_proj"])
    if shape.intermediate_size == config.intermediate_size:
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(layer.mlp, name).weight.copy_(weights[f"mlp.{name}"])
    layer.hidden_norm.weight.copy_(weights["input_layernorm"])
    layer.post_attention_layernorm.weight.copy_(weights["post_attention_layernorm"])
    head.norm.weight.copy_(final_norm)
    head.lm_head.weight.copy_(embedding[vocabulary])  # The checkpoint's output head and embedding are tied.
    head.fc.weight.normal_(std=NOISE)
    head.fc.weight[:, -hidden:] += torch.eye(hidden)
    return head
