"""Computes a training forward pass with the weights of transformers' model.

All views (images or pairs of video frames) in a batch have the same size, and the vision tower processes them
together. packing.py puts several branches (questions with answers) after a shared prefix, and the text
model's mask separates the branches. The results equal transformers' own forward pass, which evaluate.py uses.
"""

import torch
from torch.nn import functional as F
from transformers import Qwen3VLForConditionalGeneration
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLTextDecoderLayer,
    Qwen3VLTextRMSNorm,
    Qwen3VLVisionBlock,
)
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x, (..., D), by cos and sin, which broadcast to its shape."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


def vision_block(
    block: Qwen3VLVisionBlock, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """Run a vision block on x, (V, P, H). Attention stays within a view."""
    views, patches, hidden = x.shape
    attention = block.attn
    qkv = attention.qkv(block.norm1(x)).view(views, patches, 3, attention.num_heads, -1)
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    mixed = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v)
    x = x + attention.proj(mixed.transpose(1, 2).reshape(views, patches, hidden))
    return x + block.mlp(block.norm2(x))


def text_block(
    layer: Qwen3VLTextDecoderLayer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Run a decoder layer on x, (B, L, H), with a bool mask, (B, 1, L, L)."""
    attention = layer.self_attn
    shape = (*x.shape[:2], -1, attention.head_dim)
    normed = norm(layer.input_layernorm, x)
    q = norm(attention.q_norm, attention.q_proj(normed).view(shape)).transpose(1, 2)
    k = norm(attention.k_norm, attention.k_proj(normed).view(shape)).transpose(1, 2)
    v = attention.v_proj(normed).view(shape).transpose(1, 2)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    groups = attention.num_key_value_groups
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    x = x + attention.o_proj(mixed.transpose(1, 2).reshape(*x.shape[:2], -1))
    normed = norm(layer.post_attention_layernorm, x)
    mlp = layer.mlp
    return x + mlp.down_proj(F.silu(mlp.gate_proj(normed)) * mlp.up_proj(normed))


def norm(module: Qwen3VLTextRMSNorm, x: torch.Tensor) -> torch.Tensor:
    """Return the RMS norm as transformers computes it, with statistics in fp32."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
    return module.weight * wide.to(x.dtype)


def tree_mask(segments: torch.Tensor) -> torch.Tensor:
    """Return the attention mask, bool (B, 1, L, L). A token sees earlier tokens in its branch and in the
    prefix. A padding token sees earlier padding tokens.
    """
    length = segments.shape[1]
    same = segments[:, :, None] == segments[:, None, :]
    prefix = (segments[:, None, :] == 0) & (segments[:, :, None] >= 0)
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    return ((same | prefix) & causal)[:, None]


class Forward:
    """Computes features, hidden states and logits with a model's weights."""

    def __init__(self, model: Qwen3VLForConditionalGeneration, compiled: bool = True) -> None:
        self.vision = model.model.visual
        self.text = model.model.language_model
        self.head = model.lm_head
        self.geometry: dict[int, tuple[torch.Tensor, ...]] = {}
        self.text_block = torch.compile(text_block, dynamic=True) if compiled else text_block
        self.vision_block = torch.compile(vision_block, dynamic=True) if compiled else vision_block

    def _geometry(self, grid: int) -> tuple[torch.Tensor, ...]:
        """Return four tensors for a view with `grid` x `grid` patches: indices and weights of the position
        embeddings, and rotary cos and sin.
        """
        if grid not in self.geometry:
            vision, thw = self.vision, torch.tensor([[1, grid, grid]])
            indices, shares = get_vision_interpolation_indices_and_weights(
                thw,
                num_grid_per_side=vision.num_grid_per_side,
                mode=vision.interpolation_mode,
                align_corners=vision.interpolation_align_corners,
                spatial_merge_size=vision.spatial_merge_size,
            )
            dtype = self.head.weight.dtype
            cos, sin = vision.rotary_pos_emb(shares, get_vision_position_ids(thw, vision.spatial_merge_size))
            self.geometry[grid] = (indices, shares.to(dtype), cos.to(dtype), sin.to(dtype))
        return self.geometry[grid]

    def features(self, patches: torch.Tensor, grid: int) -> list[torch.Tensor]:
        """Return merged tokens and deepstack features, each (V * P/4, H), for patches (V, P, 1536)."""
        vision = self.vision
        indices, shares, cos, sin = self._geometry(grid)
        weight = vision.patch_embed.proj.weight
        x = F.linear(patches.to(weight.dtype), weight.flatten(1), vision.patch_embed.proj.bias)
        x = x + (vision.pos_embed(indices) * shares[:, :, None]).sum(1)
        deepstack = []
        for number, block in enumerate(vision.blocks):
            x = self.vision_block(block, x, cos, sin)
            if number in vision.deepstack_visual_indexes:
                merger = vision.deepstack_merger_list[vision.deepstack_visual_indexes.index(number)]
                deepstack.append(merger(x))
        return [vision.merger(x), *deepstack]

    def hidden(self, batch: dict, features: list[torch.Tensor]) -> torch.Tensor:
        """Return the final hidden states (B * L, H)."""
        x = self.text.embed_tokens(batch["ids"])
        shape, slots = x.shape, batch["slots"]
        x = x.flatten(0, 1).index_copy(0, slots, features[0]).view(shape)
        cos, sin = self.text.rotary_emb(x, batch["positions"])
        cos, sin, mask = cos[:, None], sin[:, None], tree_mask(batch["segments"])
        for number, layer in enumerate(self.text.layers):
            x = self.text_block(layer, x, cos, sin, mask)
            if number + 1 < len(features):
                x = x.flatten(0, 1).index_add(0, slots, features[number + 1]).view(shape)
        return norm(self.text.norm, x).flatten(0, 1)

    def logits(self, batch: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return three tensors: the N targets' logits, fp32 (N, vocab); the targets' indices in the flattened
        batch; and the merged visual tokens.
        """
        features = self.features(batch["patches"], batch["grid"])
        places = (batch["targets"].flatten() >= 0).nonzero()[:, 0]
        hidden = self.hidden(batch, features)[places]
        return self.head(hidden).float(), places, features[0]
