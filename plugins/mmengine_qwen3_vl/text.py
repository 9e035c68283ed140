"""The text decoder of Qwen3-VL over a ragged batch: t tokens of any rows, one after the other.

Which tokens see which is the attention port's business; here every token is alone but for that
call. On small models a decode step is mostly the cost of launching operations, so q, k and v are
one matmul, gate and up another, and both norms and the rotation run on q and k together.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mmengine.models.plugin import AttentionPort, AuxHiddenStates
from mmengine.models.reader import WeightReader
from mmengine.models.sharding import Shard
from mmengine_qwen3_vl.config import TextConfig
from mmengine_qwen3_vl.loading import HEAD
from mmengine_qwen3_vl.prepacked import Linear, MakeLinear, linear_of


@dataclass(slots=True)
class Layer:
    input_norm: Tensor  # [hidden]
    qkv: Linear  # hidden to (heads + 2 * kv_heads) * head_dim
    qk_norm: Tensor  # [heads + kv_heads, head_dim]: q's weight on each head, then k's
    out: Linear  # heads * head_dim to hidden
    post_norm: Tensor  # [hidden]
    gate_up: Linear  # hidden to 2 * intermediate
    down: Linear  # intermediate to hidden


class TextDecoder:
    """Embedding, layers, final norm and head. Keeps no state between calls. With a `shard`: the part of one
    rank, whose sizes `config` tells; the head is rank 0's."""

    batch_invariant = False  # torch chooses its products by the number of rows

    def __init__(
        self,
        config: TextConfig,
        weights: WeightReader,
        device: torch.device,
        shard: Shard | None = None,
        make_linear: MakeLinear = linear_of,
    ) -> None:
        self.config = config
        leads = shard is None or shard.leads
        self._sum = shard.all_reduce if shard is not None else _unsplit
        self._layers = [
            _read_layer(config, weights, i, make_linear, adds_bias=leads) for i in range(config.num_layers)
        ]
        self._norm = weights.read("text.norm.weight")
        self._embedding = weights.read("text.embed_tokens.weight")
        self._rotary = Rotary(config, device)
        # Rounds where the reference rounds: below float32 that is before the norm's weight.
        self._rms_norm = _rms_norm if self._norm.dtype == torch.float32 else _rms_norm_rounded
        self._head: Linear | None = None
        if not leads:
            return
        # A head stored beside a tied config counts only when it differs, as in transformers.
        tied = HEAD not in weights or (config.tied and weights.same(HEAD, "text.embed_tokens.weight"))
        self._head = make_linear(self._embedding if tied else weights.read(HEAD), None)

    def embed(self, input_ids: Tensor) -> Tensor:
        """int64 [t] to [t, hidden]."""
        return F.embedding(input_ids, self._embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        """Normed hidden states [s, hidden] to float32 [s, vocab]. Rank 0's business."""
        assert self._head is not None
        return self._head(hidden).float()

    def forward(
        self,
        embeds: Tensor,
        deepstack: Tensor | None,
        positions: Tensor,
        attention: AttentionPort,
        aux_hidden_states: AuxHiddenStates | None = None,
    ) -> Tensor:
        """embeds [t, hidden], deepstack [n, t, hidden] (zero at text) or None, positions int64 [3, t]
        to normed hidden states [t, hidden]. q, k and v reach the port as views of one tensor. Fills the
        rows of `aux_hidden_states`."""
        cos, sin = self._rotary.rows(positions, embeds.dtype)
        eps = self.config.rms_norm_eps
        hidden = embeds
        for index, layer in enumerate(self._layers):
            if aux_hidden_states is not None:
                aux_layer(aux_hidden_states, index, hidden)
            normed = self._rms_norm(hidden, layer.input_norm, eps)
            hidden = hidden + self._attend(index, layer, normed, cos, sin, attention)
            normed = self._rms_norm(hidden, layer.post_norm, eps)
            gate, up = layer.gate_up(normed).chunk(2, -1)
            hidden = hidden + self._sum(layer.down(F.silu(gate) * up))
            if deepstack is not None and index < len(deepstack):
                hidden = hidden + deepstack[index]
        if aux_hidden_states is not None:
            aux_layer(aux_hidden_states, len(self._layers), hidden)
        return self._rms_norm(hidden, self._norm, eps)

    def _attend(
        self, index: int, layer: Layer, normed: Tensor, cos: Tensor, sin: Tensor, attention: AttentionPort
    ) -> Tensor:
        c = self.config
        qkv = layer.qkv(normed).view(len(normed), -1, c.head_dim)
        num_qk = c.num_heads + c.num_kv_heads
        qk = F.rms_norm(qkv[:, :num_qk], (c.head_dim,), None, c.rms_norm_eps) * layer.qk_norm
        qk = qk * cos + qk.roll(c.head_dim // 2, -1) * sin
        attention.append(index, qk[:, c.num_heads :], qkv[:, num_qk:])
        mixed = attention.run(index, qk[:, : c.num_heads])
        return self._sum(layer.out(mixed.reshape(len(normed), -1)))


class Rotary:
    """Interleaved M-RoPE: frequency i turns by the height position where i % 3 == 1, by the width
    position where i % 3 == 2 (below three times their section), else by the time position."""

    def __init__(self, config: TextConfig, device: torch.device) -> None:
        half = config.head_dim // 2
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float) / config.head_dim
        self._inv_freq = (1.0 / config.rope_theta**exponents).to(device)  # [head_dim / 2]
        axis = torch.zeros(half, dtype=torch.long)
        for which in (1, 2):
            axis[which : 3 * config.mrope_section[which] : 3] = which
        self.axis = axis.to(device)  # [head_dim / 2], the row of positions each frequency follows

    def rows(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """int64 [3, t] to cos and sin, [t, 1, head_dim] each, computed in float32. sin's first half
        is negated: x * cos + roll(x, head_dim / 2) * sin is the rotation."""
        cos, sin = (half.to(dtype) for half in self.halves(positions))
        return torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)

    def halves(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of the angles, float32 [t, head_dim / 2] each without gaps."""
        angles = positions.float().index_select(0, self.axis).t().contiguous() * self._inv_freq
        return angles.cos(), angles.sin()


def aux_layer(aux_hidden_states: AuxHiddenStates, layer: int, hidden: Tensor) -> None:
    for place, aux_rows in enumerate(aux_hidden_states.layers):
        if aux_rows == layer:
            aux_hidden_states.rows[:, place * hidden.shape[1] :][:, : hidden.shape[1]] = hidden


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def _rms_norm_rounded(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, None, eps) * weight


def _unsplit(x: Tensor) -> Tensor:
    """The sum over one rank."""
    return x


def _read_layer(
    config: TextConfig, weights: WeightReader, index: int, make_linear: MakeLinear, *, adds_bias: bool
) -> Layer:
    """`adds_bias`: whether this rank adds the biases of which there is one for all ranks' sum."""

    def read(*names: str) -> Tensor:
        return weights.read(*(f"text.layers.{index}.{name}" for name in names))

    def linear(*names: str, biased: bool = False) -> Linear:
        bias = read(*(f"{name}.bias" for name in names)) if biased else None
        return make_linear(read(*(f"{name}.weight" for name in names)), bias)

    projections = [f"self_attn.{name}_proj" for name in ("q", "k", "v")]
    q_norm, k_norm = read("self_attn.q_norm.weight"), read("self_attn.k_norm.weight")
    return Layer(
        input_norm=read("input_layernorm.weight"),
        qkv=linear(*projections, biased=config.attention_bias),
        qk_norm=torch.cat((q_norm.expand(config.num_heads, -1), k_norm.expand(config.num_kv_heads, -1))),
        out=linear("self_attn.o_proj", biased=config.attention_bias and adds_bias),
        post_norm=read("post_attention_layernorm.weight"),
        gate_up=linear("mlp.gate_proj", "mlp.up_proj"),
        down=linear("mlp.down_proj"),
    )
