"""The interface for the network of a draft head (MTP, EAGLE). Batches are ragged, with t tokens in total.

At position p, the head reads the embedding of token x[p + 1]. It also reads the target's auxiliary hidden
states at p, or the head's own previous output. The head predicts x[p + 2]. Its KV is stored in the slot for
x[p].
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mmengine.checkpoint.tensors import TensorEntry
from mmengine.core.executor import NO_DRAFT
from mmengine.models.plugin import AttentionPort, ModelSpec
from mmengine.runtime.attention.base import AttentionBackend
from mmengine.runtime.device.placement import Placement
from mmengine.runtime.device.upload import upload
from mmengine.runtime.drafting.head.chain_rows import ChainRows


class HeadSizes(Protocol):
    """A draft head's sizes, which determine its KV pool, its drafter and its memory."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def target_hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The target's layers whose inputs the head reads, ascending. An entry equal to the target's layer
        count means the final norm's input.
        """
        ...

    @property
    def num_drafts(self) -> int:
        """The default number of drafts per step."""
        ...


class HeadFiles(Protocol):
    """A draft head with checked files, before its weights are read."""

    @property
    def config(self) -> HeadSizes: ...
    @property
    def entries(self) -> Mapping[str, TensorEntry]: ...


def kv_spec(config: HeadSizes, max_model_len: int = 0) -> ModelSpec:
    """Return a ModelSpec with a draft head's KV sizes. `max_model_len`: maximum length of a request in
    tokens; 0 if unknown.
    """
    return ModelSpec(
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_model_len=max_model_len,
        num_deepstack=0,
        patch_width=0,
    )


class HeadNetwork(ABC):
    """A draft head's network, without state between calls. `name`: the drafter's name. `device`, `dtype`: the
    device and dtype for weights and hidden states.
    """

    name: str
    config: HeadSizes

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.device, self.dtype = placement.device.torch_device, placement.dtype

    @abstractmethod
    def fuse(self, aux_hidden_states: Tensor) -> Tensor:
        """Convert the target's states [t, aux_layers * target_hidden_size] to [t, h], an input of
        `forward`.
        """

    @abstractmethod
    def embed(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings [t, embed_size] for target token ids, int64 [t]."""

    @abstractmethod
    def forward(
        self,
        hidden: Tensor,
        next_embeds: Tensor,
        positions: Tensor,
        attention: AttentionPort,
        first_layer: int,
    ) -> tuple[Tensor, Tensor]:
        """Compute a pass. Returns z [t, h], the input of `logits`, and carry [t, h], the input of the next
        pass.

        `hidden` [t, h]: the result of `fuse`, or the `carry` of the previous pass. `next_embeds` [t,
        embed_size]: the next tokens' embeddings. `positions`: int64 [3, t], the positions for the hidden
        states. `first_layer`: the head's first layer in `attention`.
        """

    @abstractmethod
    def logits(self, z: Tensor) -> Tensor:
        """Return the logits, float32 [s, draft_vocab_size], of z [s, h]."""

    def tokens(self, logits: Tensor) -> Tensor:
        """Return each row's likeliest token, as a target token id, int64 [s]."""
        return logits.argmax(-1)

    def chain(
        self,
        z: Tensor,
        carry: Tensor,
        rows: ChainRows,
        attention: AttentionBackend,
        first_layer: int,
        block_size: int,
    ) -> Tensor:
        """Return the drafts for n rows, int64 [max(most), n]. A row's drafts are the drafts in `rows`, then
        greedily chosen drafts.

        The rows must be sorted by descending `rows.most`. Entries beyond a row's `most` are undefined. `z`,
        `carry`: [n, h], the results of `forward` for each row's last token.
        """
        drafts = upload(rows.drafts(), z.device)
        for ahead in range(len(drafts)):
            tokens = drafts[ahead, : len(z)]
            torch.where(tokens == NO_DRAFT, self.tokens(self.logits(z)), tokens, out=tokens)
            active = int(np.count_nonzero(rows.most > ahead + 1))
            if not active:
                break
            attention.begin(rows.meta(ahead, active, block_size))
            positions = upload(rows.positions[:active].astype(np.int64) + ahead, z.device)
            embeds = self.embed(tokens[:active])
            z, carry = self.forward(carry[:active], embeds, positions.expand(3, -1), attention, first_layer)
        return drafts
