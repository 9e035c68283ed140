"""A checkpoint's multi-token-prediction (MTP) head as a draft head.

The head reads the target's hidden states before the final norm, and applies this norm itself. The head's
normed output is the hidden state for the next draft.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mmengine.checkpoint.tensors import TensorEntry
from mmengine.errors import ModelError
from mmengine.models.decoder.config import DecoderConfig
from mmengine.models.decoder.layers import read_norm
from mmengine.models.decoder.operations import rms_norm_of
from mmengine.models.mtp.files import EMBEDDING_NORM, FC, HIDDEN_NORM, TARGET_NORM, MtpHead
from mmengine.models.network import text_decoder
from mmengine.models.plugin import AttentionPort, VisionLanguageModel
from mmengine.models.quantising import CODINGS, Activations, Quantize
from mmengine.models.reader import WHOLE, WeightReader, open_reader
from mmengine.runtime.device.placement import Placement
from mmengine.runtime.drafting.head.linears import linear_of
from mmengine.runtime.drafting.head.network import HeadNetwork

DEFAULT_DRAFTS = 4


@dataclass(frozen=True, slots=True)
class MtpConfig:
    """The sizes of an MTP head. Implements HeadSizes (head/network.py)."""

    decoder: DecoderConfig
    aux_layers: tuple[int, ...]
    num_drafts: int

    @property
    def hidden_size(self) -> int:
        return self.decoder.hidden_size

    @property
    def target_hidden_size(self) -> int:
        return self.decoder.hidden_size

    @property
    def num_layers(self) -> int:
        return self.decoder.num_layers

    @property
    def num_heads(self) -> int:
        return self.decoder.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.decoder.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.decoder.head_dim

    @property
    def vocab_size(self) -> int:
        return self.decoder.vocab_size


@dataclass(frozen=True, slots=True)
class MtpFiles:
    """A checked MTP head and its number of drafts. Implements HeadFiles (head/network.py)."""

    config: MtpConfig
    entries: dict[str, TensorEntry]

    @staticmethod
    def of(head: MtpHead, num_drafts: int) -> "MtpFiles":
        return MtpFiles(MtpConfig(head.decoder, (head.target_layers,), num_drafts), head.entries)


class MtpNetwork(HeadNetwork):
    """The network of an MTP head. `model`: the target, whose embedding and LM head are used."""

    name = "mtp"
    config: MtpConfig

    def __init__(
        self, config: MtpConfig, weights: WeightReader, model: VisionLanguageModel, placement: Placement
    ) -> None:
        super().__init__(placement)
        self.config, self._model = config, model
        decoder = config.decoder
        self._target_norm, self._hidden_norm, self._embedding_norm = (
            read_norm(decoder, weights, name) for name in (TARGET_NORM, HIDDEN_NORM, EMBEDDING_NORM)
        )
        self._fc = linear_of(weights.read(FC))
        self._layers = text_decoder(decoder, weights, self.device, self.dtype, has_vocabulary=False)
        self._rms_norm = rms_norm_of(self.dtype, once=decoder.norm_offset)

    def fuse(self, aux_hidden_states: Tensor) -> Tensor:
        return self._rms_norm(aux_hidden_states, self._target_norm, self.config.decoder.rms_norm_eps)

    def embed(self, input_ids: Tensor) -> Tensor:
        return self._model.embed(input_ids)

    def forward(
        self,
        hidden: Tensor,
        next_embeds: Tensor,
        positions: Tensor,
        attention: AttentionPort,
        first_layer: int,
    ) -> tuple[Tensor, Tensor]:
        if first_layer:
            raise ValueError(f"an MTP head's KV begins at layer 0 of its pool, not at {first_layer}")
        eps = self.config.decoder.rms_norm_eps
        parts = (
            self._rms_norm(next_embeds, self._embedding_norm, eps),
            self._rms_norm(hidden, self._hidden_norm, eps),
        )
        z = self._layers.forward(self._fc(torch.cat(parts, -1)), None, positions, attention)
        return z, z

    def logits(self, z: Tensor) -> Tensor:
        return self._model.logits(z)


def load_mtp_head(
    files: MtpFiles,
    model: VisionLanguageModel,
    placement: Placement,
    quantize: Quantize = "none",
    activations: Activations = "model",
) -> MtpNetwork:
    """Load an MTP head's weights. `quantize`, `activations`: as for the target. Raises ModelError if the head
    cannot be read or does not fit into memory.
    """
    device = placement.device.torch_device
    coding = CODINGS.get(quantize)
    try:
        with (
            torch.inference_mode(),
            open_reader(files.entries, device, placement.dtype, WHOLE, coding, activations) as weights,
        ):
            return MtpNetwork(files.config, weights, model, placement)
    except torch.OutOfMemoryError:
        raise ModelError(f"the MTP head does not fit into the memory of {placement.device.name}") from None
