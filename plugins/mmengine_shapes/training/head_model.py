"""A trainable EAGLE-3 draft head (arXiv 2503.01840): a decoder layer that drafts tokens from tapped
states: the inputs of some of the target's layers (the tapped layers).

At position p, the head reads the tapped states at p and the token at p + 1, and predicts the token at p + 2.
In later draft steps, the head's own output replaces the tapped states. Parameter names are as in published
heads. The options `fc_norm` (normalise each tapped state) and `norm_output` (normalise the state for the next
step) come from EAGLE 3.1.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmengine.models.decoder.config import DecoderConfig
from mmengine.models.decoder.rotary import Rotary


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The head's sizes and options that do not follow from the target's config."""

    levels: tuple[int, ...]  # Tapped layers. The number i stands for the input of the target's layer i.
    draft_vocab_size: int
    intermediate_size: int
    fc_norm: bool = True
    norm_output: bool = True


@dataclass(frozen=True, slots=True)
class HeadBatch:
    """B conversations, padded to n tokens. In each, drafts begin at up to R positions (`rows`)."""

    ids: Tensor  # int64 [B, n], padding at the end.
    positions: Tensor  # int64 [3, B, n]
    aux_hidden_states: Tensor  # float32 [B, n, levels, hidden]
    # int64 [B, R]: index of the last prompt token, then indices of answer tokens. Padding repeats the last
    # index.
    rows: Tensor
    valid: Tensor  # bool [B, R]
    lengths: Tensor  # int64 [B]


class DraftAttention(nn.Module):
    """The attention's projections. q, k and v read the embedding concatenated with the hidden state."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(2 * config.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)


class DraftMLP(nn.Module):
    """The gated MLP of a Llama layer."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """The head's decoder layer."""

    def __init__(self, config: DecoderConfig, intermediate_size: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(hidden, eps)
        self.hidden_norm = nn.RMSNorm(hidden, eps)
        self.self_attn = DraftAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps)
        self.mlp = DraftMLP(hidden, intermediate_size)


class DraftHead(nn.Module):
    """The draft head. `embedding`: the target's frozen embedding, not a parameter."""

    embedding: Tensor

    def __init__(self, config: DecoderConfig, shape: HeadShape, embedding: Tensor) -> None:
        super().__init__()
        self.config, self.shape = config, shape
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(shape.levels) * hidden, hidden, bias=False)
        self.fc_norm = nn.ModuleList(nn.RMSNorm(hidden, eps) for _ in shape.levels if shape.fc_norm)
        self.midlayer = DraftLayer(config, shape.intermediate_size)
        self.norm = nn.RMSNorm(hidden, eps)
        self.lm_head = nn.Linear(hidden, shape.draft_vocab_size, bias=False)
        self.register_buffer("embedding", embedding, persistent=False)
        self._rotary = Rotary(config.rope, config.head_dim, embedding.device)

    def fuse(self, aux_hidden_states: Tensor) -> Tensor:
        """Return tapped states, [..., levels, hidden], combined to a hidden state, [..., hidden]."""
        if self.fc_norm:
            aux_hidden_states = torch.stack(
                [norm(aux_hidden_states[..., i, :]) for i, norm in enumerate(self.fc_norm)], -2
            )
        return self.fc(aux_hidden_states.flatten(-2))

    def unroll(
        self, batch: HeadBatch, steps: int, token_of: Callable[[int, Tensor | None], Tensor]
    ) -> list[Tensor]:
        """Draft from all positions in `rows` together. Return each step's logits, [B, R, draft_vocab].
        `token_of(k, logits of step k - 1)`: returns the tokens that step k reads, int64 [B, R]. Step 0 reads
        the tapped states and computes keys for the whole conversation. As in an engine, a draft attends to
        these keys up to the draft's first position, and to its own keys from later steps.
        """
        attn = self.midlayer.self_attn
        fused = self.fuse(batch.aux_hidden_states)
        following = F.pad(batch.ids[:, 1:], (0, 1))
        past = self._inputs(following, fused)
        keys = self._rotate(self._heads(attn.k_proj(past)), batch.positions)
        values = self._heads(attn.v_proj(past))
        visible = torch.arange(fused.shape[1]) <= batch.rows[..., None]  # [B, R, n]
        places = batch.positions.gather(2, batch.rows.expand(3, -1, -1))
        hidden = fused.gather(1, batch.rows[..., None].expand(-1, -1, fused.shape[-1]))
        own: list[tuple[Tensor, Tensor]] = []
        outputs: list[Tensor] = []
        for k in range(steps):
            inputs = self._inputs(token_of(k, outputs[-1] if k else None), hidden)
            if k:
                own.append(
                    (
                        self._rotate(self._heads(attn.k_proj(inputs)), places + k),
                        self._heads(attn.v_proj(inputs)),
                    )
                )
            q = self._rotate(self._heads(attn.q_proj(inputs)), places + k)
            hidden = hidden + attn.o_proj(_attend(q, keys, values, visible, own))
            hidden = hidden + self.midlayer.mlp(self.midlayer.post_attention_layernorm(hidden))
            normed = self.norm(hidden)
            outputs.append(self.lm_head(normed))
            hidden = normed if self.shape.norm_output else hidden
        return outputs

    def _inputs(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Return the tokens' normalised embeddings and the normalised `hidden` states, [..., 2 * hidden]."""
        layer = self.midlayer
        embeds = layer.input_layernorm(F.embedding(tokens, self.embedding))
        return torch.cat((embeds, layer.hidden_norm(hidden)), -1)

    def _heads(self, x: Tensor) -> Tensor:
        """Split [B, m, heads * head_dim] to [B, m, heads, head_dim]."""
        return x.unflatten(-1, (-1, self.config.head_dim))

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x, [B, m, heads, head_dim], by interleaved M-RoPE positions, int64 [3, B, m]."""
        cos, sin = self._rotary.rows(positions.flatten(1), x.dtype)
        shape = (*x.shape[:2], 1, x.shape[-1])
        return x * cos.view(shape) + x.roll(x.shape[-1] // 2, -1) * sin.view(shape)


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, visible: Tensor, own: list[tuple[Tensor, Tensor]]
) -> Tensor:
    """Return the attention's output, [B, R, heads * d], for queries q, [B, R, heads, d].

    A query attends to step 0's keys and values, [B, n, kv, d], where `visible` [B, R, n] is true. It also
    attends to its own draft's keys and values from later steps (`own`, each [B, R, kv, d]).
    """
    batch, rows, heads, d = q.shape
    kv = keys.shape[2]
    q = q.view(batch, rows, kv, heads // kv, d) * d**-0.5
    scores = torch.einsum("brkgd,bnkd->bkgrn", q, keys)
    scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    mine = [torch.einsum("brkgd,brkd->bkgr", q, k)[..., None] for k, _ in own]
    weights = torch.cat((scores, *mine), -1).softmax(-1)
    length = keys.shape[1]
    mixed = torch.einsum("bkgrn,bnkd->brkgd", weights[..., :length], values)
    for number, (_, v) in enumerate(own):
        share = weights[..., length + number].permute(0, 3, 1, 2)[..., None]  # [B, R, kv, g, 1]
        mixed = mixed + share * v[:, :, :, None]
    return mixed.flatten(2)
