"""The gated delta net in torch: a short convolution, and a matrix (the state) that each token updates.

    S <- exp(g) S;  S <- S + k (beta (v - S'k))';  o = S'q / sqrt(key_dim)      (arXiv 2412.06464)

Here q and k are L2-normalised. Rows with many tokens are computed in chunks with matrix products, as in
transformers' `torch_chunk_gated_delta_rule`. Rows with few tokens are computed token by token. Both ways use
float32, and round values where transformers does. The CPU kernels (native/src/layers/delta.cpp) always
compute token by token.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from mmengine.models.decoder.config import DeltaConfig
from mmengine.models.decoder.prepacked import Linear
from mmengine.models.states import StateSpec, StepStates
from mmengine.native.decoder_weights import DeltaWeights

CHUNK = 64
FEW = 8  # Up to this number of tokens, computing token by token is faster than a chunk.
Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class DeltaMixer:
    """A layer's gated delta net. It reads and updates the recurrent states in a step."""

    def __init__(self, config: DeltaConfig, weights: DeltaWeights[Linear], eps: float, layer: int) -> None:
        """`layer`: index among the layers with states."""
        self._config, self._w, self._eps, self._layer = config, weights, eps, layer
        self._taps = weights.conv.t().contiguous().unsqueeze(1).to(weights.norm.dtype)  # [width, 1, taps]
        sizes = (config.width, config.taps, config.num_heads, config.key_dim, config.value_dim)
        self._spec = StateSpec(1, *sizes)

    def mix(self, projected: Tensor, x: Tensor, states: StepStates | None) -> Tensor:
        """Return the mixed tokens [t, values], before the output projection.

        `x`: [t, hidden], the layer's normed input. `projected`: [t, width + values], the input projection of
        x, with the convolution's channels and then the output gate. `states`: if None, all tokens are one row
        that starts with an empty state.
        """
        width = self._spec.width
        channels, gate = projected.split((width, projected.shape[1] - width), 1)
        inputs = torch.cat((channels, self._w.ba(x)), 1)
        mixed = self._one_row(inputs) if states is None else self._rows(inputs, states)
        return self._gated(mixed, gate)

    def _one_row(self, inputs: Tensor) -> Tensor:
        spec = self._spec
        window = inputs.new_zeros(spec.taps - 1 + len(inputs), spec.width)
        window[spec.taps - 1 :] = inputs[:, : spec.width]
        state = inputs.new_zeros(spec.num_heads, spec.key_dim, spec.value_dim, dtype=torch.float32)
        return self._run(window, inputs, state)[0]

    def _rows(self, inputs: Tensor, states: StepStates) -> Tensor:
        """Return the outputs [t, heads, value_dim] for inputs [t, input_width]. Updates the rows' states."""
        spec, starts = self._spec, states.query_starts
        mixed = inputs.new_empty(len(inputs), spec.num_heads, spec.value_dim)
        lengths = starts[1:] - starts[:-1]
        kept = states.kept_starts[1:] > states.kept_starts[:-1]
        alone = (lengths == 1) & (states.stayed == 0) & ~kept
        if alone.any():
            self._decode(inputs, states, alone, mixed)
        for place in (~alone).nonzero()[0].tolist():
            self._row(inputs[starts[place] : starts[place + 1]], states, place, mixed[starts[place] :])
        return mixed

    def _decode(self, inputs: Tensor, states: StepStates, alone: Tensor, mixed: Tensor) -> None:
        """Compute the rows with a single token together, and write the outputs to `mixed`. `alone`: the mask
        of these rows.
        """
        layer, device = self._layer, inputs.device
        tokens = torch.from_numpy(states.query_starts[:-1][alone].astype("int64")).to(device)
        slots = torch.from_numpy(states.slots[alone].astype("int64")).to(device)
        own = inputs.index_select(0, tokens)
        window = torch.cat((states.conv[slots, layer], own[:, None, : self._spec.width]), 1)
        q, k, v = self._heads(self._convolved(window.transpose(1, 2))[:, :, 0])
        decay, beta = self._gates(own)
        out, state = one_by_one(
            q[None], k[None], v[None], decay[None], beta[None], states.recurrent[slots, layer]
        )
        states.recurrent[slots, layer], states.conv[slots, layer] = state, window[:, 1:]
        mixed[tokens] = out[0].to(mixed.dtype)

    def _row(self, inputs: Tensor, states: StepStates, place: int, mixed: Tensor) -> None:
        layer, spec = self._layer, self._spec
        slot, row, stayed = (int(each[place]) for each in (states.slots, states.rows, states.stayed))
        sure, count = stayed + int(states.certain[place]), len(inputs)
        if stayed:
            inputs = torch.cat((states.pending[row, layer, :stayed], inputs))
        window = torch.cat((states.conv[slot, layer], inputs[:, : spec.width]))
        first, last = states.kept_starts[place : place + 2].tolist()
        kept = dict(
            zip(states.kept_after[first:last].tolist(), states.kept_slots[first:last].tolist(), strict=True)
        )
        ends, outputs, start = sorted({*kept, sure, len(inputs)}), [], 0
        state = states.recurrent[slot, layer]
        for end in ends:
            out, state = self._run(window[start : end + spec.taps - 1], inputs[start:end], state)
            outputs.append(out)
            for target in [kept.get(end), slot if end == sure else None]:
                if target is None:
                    continue
                states.recurrent[target, layer] = state
                states.conv[target, layer] = window[end : end + spec.taps - 1]
            start = end
        if len(inputs) > sure:
            states.pending[row, layer, : len(inputs) - sure] = inputs[sure:]
        mixed[:count] = torch.cat(outputs)[stayed:]

    def _run(self, window: Tensor, inputs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Compute n tokens of a row. Returns their outputs [n, heads, value_dim] and the state after them.

        `window`: [taps - 1 + n, width], the convolution's inputs for the taps - 1 previous tokens, then for
        the n tokens.
        """
        if not len(inputs):
            return inputs.new_empty(0, self._spec.num_heads, self._spec.value_dim), state
        q, k, v = self._heads(self._convolved(window.t()[None])[0].t())
        decay, beta = self._gates(inputs)
        rule: Rule = one_by_one if len(inputs) <= FEW else in_chunks
        q, k, v, decay, beta = (each.unsqueeze(1) for each in (q, k, v, decay, beta))
        out, after = rule(q, k, v, decay, beta, state[None])
        return out[:, 0].to(inputs.dtype), after[0]

    def _convolved(self, window: Tensor) -> Tensor:
        """Return the convolution [n, width, t] over `window` [n, width, taps - 1 + t], after silu."""
        return F.silu(F.conv1d(window, self._taps, groups=self._spec.width))

    def _heads(self, channels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split [t, width] into q, k and v, float32 [t, heads, dim]. q and k are L2-normalised, q is scaled,
        and both are repeated for the value heads that share them.
        """
        c, t = self._config, len(channels)
        keys, values = c.num_key_heads * c.key_dim, c.num_heads * c.value_dim
        q, k, v = channels.float().split((keys, keys, values), 1)
        q, k = (_unit(each.reshape(t, c.num_key_heads, c.key_dim)) for each in (q, k))
        shared = c.num_heads // c.num_key_heads
        q, k = q * c.key_dim**-0.5, k
        if c.tiled:
            q, k = (each.repeat(1, shared, 1) for each in (q, k))
        else:
            q, k = (each.repeat_interleave(shared, 1) for each in (q, k))
        return q, k, v.reshape(t, c.num_heads, c.value_dim)

    def _gates(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return (log decay, beta), both float32 [t, heads]."""
        b, a = inputs[:, self._spec.width :].chunk(2, 1)
        return self._w.decay * F.softplus(a.float() + self._w.dt_bias), b.sigmoid().float()

    def _gated(self, mixed: Tensor, gate: Tensor) -> Tensor:
        """Apply RMS norm to each head, and multiply by the gate."""
        dtype, wide = mixed.dtype, mixed.float()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)).to(dtype)
        gated = self._w.norm * normed * F.silu(gate.reshape(mixed.shape).float())
        return gated.to(dtype).reshape(len(mixed), -1)


def one_by_one(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the delta rule for n rows with t tokens each, one token after another. Returns the outputs, in
    the shape of v, and the state after the last token.

    All tensors are float32. q, k: [t, n, heads, key_dim]. v: [t, n, heads, value_dim]. decay (a logarithm)
    and beta: [t, n, heads]. state: [n, heads, key_dim, value_dim].
    """
    outputs = []
    for q_t, k_t, v_t, g_t, beta_t in zip(q, k, v, decay, beta, strict=True):
        state = state * g_t.exp()[..., None, None]
        delta = (v_t - (state * k_t[..., None]).sum(-2)) * beta_t[..., None]
        state = state + k_t[..., None] * delta[..., None, :]
        outputs.append((state * q_t[..., None]).sum(-2))
    return torch.stack(outputs), state


def in_chunks(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Do the same as `one_by_one` with matrix products, for CHUNK tokens at a time."""
    outputs = []
    q, k, v = (each.permute(1, 2, 0, 3) for each in (q, k, v))
    decay, beta = (each.permute(1, 2, 0) for each in (decay, beta))
    for first in range(0, q.shape[2], CHUNK):
        part = slice(first, first + CHUNK)
        numbers = decay[:, :, part], beta[:, :, part]
        out, state = _chunk(q[:, :, part], k[:, :, part], v[:, :, part], *numbers, state)
        outputs.append(out.permute(2, 0, 1, 3))
    return torch.cat(outputs), state


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the delta rule for a chunk of c tokens. q, k, v: [n, heads, c, dim]. decay and beta: [n, heads,
    c].

    Returns the outputs [n, heads, c, value_dim] and the state after the chunk.
    """
    total = decay.cumsum(-1)  # The logarithm of the decay since the chunk's beginning.
    later = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(later, float("-inf")).exp()
    k_beta = k * beta[..., None]
    system = (k_beta @ k.transpose(-1, -2)) * between
    grown = total.exp()[..., None]
    solve = torch.linalg.solve_triangular
    new = solve(system, v * beta[..., None], upper=False, unitriangular=True)
    read = solve(system, k_beta * grown, upper=False, unitriangular=True)
    corrected = new - read @ state
    out = (q * grown) @ state + ((q @ k.transpose(-1, -2)) * between) @ corrected
    rest = (total[..., -1:] - total).exp()[..., None]
    return out, state * total[..., -1].exp()[..., None, None] + (k * rest).transpose(-1, -2) @ corrected


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
