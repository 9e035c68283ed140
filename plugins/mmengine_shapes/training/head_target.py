"""What the target's layers read, for whole conversations at once.

A draft head is fed with the residual stream as it enters some layers, deepstack features added, and
for the id `num_layers` with what the final norm reads. The engine's own decoder computes it here, with
dense attention over a padded batch. (transformers' `output_hidden_states` would not do: it records
the states before deepstack features are added, and the last one after the final norm.)
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from mmengine_qwen3_vl import plugin
from mmengine_qwen3_vl.config import read_config
from mmengine_qwen3_vl.loading import open_weights
from mmengine_qwen3_vl.text import TextDecoder
from mmengine_shapes.training.head_data import Conversation, Sample

PAD = 0


class DenseAttention:
    """The attention port over `rows` sequences of one padded length: padding stands behind, so causal
    attention never sees it."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._kept: tuple[Tensor, Tensor] | None = None

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._kept = self._split(k), self._split(v)

    def run(self, layer: int, q: Tensor) -> Tensor:
        k, v = self._kept
        mixed = F.scaled_dot_product_attention(self._split(q), k, v, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2).reshape(q.shape)

    def _split(self, x: Tensor) -> Tensor:
        return x.view(self._rows, -1, *x.shape[1:]).transpose(1, 2)


def stored(folder: Path, *names: str) -> list[Tensor]:
    """Weights of the checkpoint by their canonical names, in float32."""
    with open_weights(folder, read_config(folder), torch.device("cpu"), torch.float32) as weights:
        return [weights.read(name) for name in names]


class Target:
    """The frozen checkpoint in float32: its decoder, with an ear at the norms that read what is tapped."""

    def __init__(self, folder: Path, levels: Sequence[int]) -> None:
        """`levels`: ids of taps, ascending; i is the input of layer i, num_layers that of the final norm."""
        self.folder, self.config = folder, read_config(folder)
        self.levels = tuple(levels)
        self._vision = plugin.load_model(folder, device="cpu", dtype="float32")
        device = torch.device("cpu")
        with torch.inference_mode(), open_weights(folder, self.config, device, torch.float32) as weights:
            self._text = TextDecoder(self.config.text, weights, device)
        # The residual stream that enters a layer is what the layer's first norm is given.
        norms = [layer.input_norm for layer in self._text._layers] + [self._text._norm]
        self._level_of = {id(norms[level]): number for number, level in enumerate(self.levels)}
        self._plain_norm, self._text._rms_norm = self._text._rms_norm, self._listening_norm
        self._heard: list[Tensor | None] = []

    def _listening_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if id(weight) in self._level_of:
            self._heard[self._level_of[id(weight)]] = x
        return self._plain_norm(x, weight, eps)

    @torch.inference_mode()
    def samples(self, conversations: Sequence[Conversation]) -> Iterator[Sample]:
        """Run a batch of conversations and give each with its taps."""
        ids = [torch.tensor(conversation.token_ids) for conversation in conversations]
        places = [self._positions(conversation) for conversation in conversations]
        length = max(map(len, ids))
        flat = torch.cat([F.pad(one, (0, length - len(one)), value=PAD) for one in ids])
        positions = torch.cat([F.pad(one, (0, length - one.shape[1])) for one in places], 1)
        embeds, deepstack = self._inputs(conversations, flat, length)
        self._heard = [None] * len(self.levels)
        self._text.forward(embeds, deepstack, positions, DenseAttention(len(ids)))
        taps = torch.stack(self._heard, 1).view(len(ids), length, len(self.levels), -1)
        for number, conversation in enumerate(conversations):
            kept = taps[number, : len(ids[number])].to(torch.float16, copy=True)
            yield Sample(conversation.task, ids[number], conversation.num_prompt, places[number], kept)

    def logits(self, states: Tensor) -> Tensor:
        """What the final norm reads, [..., hidden], to logits [..., vocab]."""
        normed = self._plain_norm(states, self._text._norm, self.config.text.rms_norm_eps)
        return self._text.logits(normed.flatten(0, -2)).view(*states.shape[:-1], -1)

    def _positions(self, conversation: Conversation) -> Tensor:
        """int64 [3, n]: the prompt's, then the answer's counted on."""
        media = [one.item for one in conversation.prepared.media]
        prompt, delta = plugin.positions(conversation.prepared.prompt_token_ids, media)
        answer = torch.arange(len(conversation.answer_ids)) + conversation.num_prompt + delta
        return torch.cat((torch.from_numpy(prompt).long(), answer.expand(3, -1)), 1)

    def _inputs(
        self, conversations: Sequence[Conversation], flat: Tensor, length: int
    ) -> tuple[Tensor, Tensor | None]:
        """Embeddings with media in their places, and deepstack features [levels, t, hidden]."""
        embeds = self._text.embed(flat)
        media, places = [], []
        for number, conversation in enumerate(conversations):
            for one in conversation.prepared.media:
                media.append(one)
                for start, count in one.item.runs:
                    places.append(torch.arange(count) + number * length + start)
        if not media:
            return embeds, None
        patches = torch.cat([torch.from_numpy(one.patches) for one in media])
        features = self._vision.encode(patches, [one.item.grid for one in media])
        first, *others = features.split(embeds.shape[1], 1)
        slots = torch.cat(places)
        deepstack = embeds.new_zeros(len(others), *embeds.shape)
        deepstack[:, slots] = torch.stack(others)
        return embeds.index_copy(0, slots, first), deepstack
