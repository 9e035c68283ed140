"""Computes training inputs for a draft head: the target's hidden states for whole conversations.

A draft head reads the inputs of some layers, after deepstack features were added. The layer id `num_layers`
stands for the input of the final norm. The engine's decoder computes these states, with dense attention over
a padded batch. transformers' `output_hidden_states` are different: they lack the deepstack features, and the
last state has passed the final norm.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from mmengine.models.plugin import AuxHiddenStates
from mmengine.models.weights import open_weights
from mmengine_qwen3_vl import plugin
from mmengine_qwen3_vl.config import read_config
from mmengine_qwen3_vl.names import NAMES
from mmengine_shapes.training.head_data import Conversation, Sample

PAD = 0


class DenseAttention:
    """Implements AttentionPort for `rows` sequences that are padded to equal length. Causal attention ignores
    the padding, which is at the end.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._kept: tuple[Tensor, Tensor] | None = None

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._kept = self._split(k), self._split(v)

    def run(self, layer: int, q: Tensor) -> Tensor:
        assert self._kept is not None, "a layer appends before it attends"
        k, v = self._kept
        mixed = F.scaled_dot_product_attention(self._split(q), k, v, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2).reshape(q.shape)

    def _split(self, x: Tensor) -> Tensor:
        return x.view(self._rows, -1, *x.shape[1:]).transpose(1, 2)


def stored(folder: Path, *names: str) -> list[Tensor]:
    """Return the checkpoint's weights with these canonical names, in float32."""
    config = read_config(folder)
    with open_weights(folder, NAMES, config, torch.device("cpu"), torch.float32) as weights:
        return [weights.read(name) for name in names]


class Target:
    """The frozen target checkpoint, in float32."""

    def __init__(self, folder: Path, levels: Sequence[int]) -> None:
        """Load the target. `levels`: ids of the layers whose inputs are recorded."""
        self.folder, self.config, self.levels = folder, read_config(folder), tuple(levels)
        self._model = plugin.load_model(folder, device="cpu", dtype="float32")
        (self._final_norm,) = stored(folder, "text.norm.weight")

    @torch.inference_mode()
    def samples(self, conversations: Sequence[Conversation]) -> Iterator[Sample]:
        """Run the conversations as one batch. Yield each conversation with the recorded inputs."""
        ids = [torch.tensor(conversation.token_ids) for conversation in conversations]
        places = [self._positions(conversation) for conversation in conversations]
        length = max(map(len, ids))
        flat = torch.cat([F.pad(one, (0, length - len(one)), value=PAD) for one in ids])
        positions = torch.cat([F.pad(one, (0, length - one.shape[1])) for one in places], 1)
        embeds, deepstack = self._inputs(conversations, flat, length)
        aux_hidden_states = AuxHiddenStates(
            self.levels, embeds.new_empty(len(embeds), len(self.levels) * embeds.shape[1])
        )
        self._model.forward(embeds, deepstack, positions, DenseAttention(len(ids)), aux_hidden_states)
        states = aux_hidden_states.rows.view(len(ids), length, len(self.levels), -1)
        for number, conversation in enumerate(conversations):
            kept = states[number, : len(ids[number])].to(torch.float16, copy=True)
            yield Sample(conversation.task, ids[number], conversation.num_prompt, places[number], kept)

    def logits(self, states: Tensor) -> Tensor:
        """Project inputs of the final norm, [..., hidden], to logits, [..., vocab]."""
        normed = F.rms_norm(states, states.shape[-1:], self._final_norm, self.config.text.rms_norm_eps)
        return self._model.logits(normed.flatten(0, -2)).view(*states.shape[:-1], -1)

    def _positions(self, conversation: Conversation) -> Tensor:
        """Return the positions of the prompt and the answer, int64 [3, n]."""
        media = [one.item for one in conversation.prepared.media]
        prompt, delta = plugin.positions(conversation.prepared.prompt_token_ids, media)
        answer = torch.arange(len(conversation.answer_ids)) + conversation.num_prompt + delta
        return torch.cat((torch.from_numpy(prompt).long(), answer.expand(3, -1)), 1)

    def _inputs(
        self, conversations: Sequence[Conversation], flat: Tensor, length: int
    ) -> tuple[Tensor, Tensor | None]:
        """Return the input embeddings, including media embeddings, and the deepstack features [levels, t,
        hidden].
        """
        embeds = self._model.embed(flat)
        media, places = [], []
        for number, conversation in enumerate(conversations):
            for one in conversation.prepared.media:
                media.append(one)
                for start, count in one.item.runs:
                    places.append(torch.arange(count) + number * length + start)
        if not media:
            return embeds, None
        patches = torch.cat([torch.from_numpy(one.patches) for one in media])
        features = self._model.encode(patches, [one.item.grid for one in media])
        first, *others = features.split(embeds.shape[1], 1)
        slots = torch.cat(places)
        deepstack = embeds.new_zeros(len(others), *embeds.shape)
        deepstack[:, slots] = torch.stack(others)
        return embeds.index_copy(0, slots, first), deepstack
