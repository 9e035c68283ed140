"""Finds a multi-token-prediction (MTP) head in a checkpoint, and checks its tensors. Does not import torch.

The head applies a norm to the target's normed hidden state and to the next token's embedding. `mtp.fc`
projects both to a single state; a decoder layer and a final norm follow. The head uses the target's embedding
and LM head. The head's layer and final norm have a decoder's canonical names, so that the decoder's code can
read them.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from mmengine.checkpoint.int4 import without_zero_biases
from mmengine.checkpoint.names import TensorNames
from mmengine.checkpoint.stacked_experts import each_expert
from mmengine.checkpoint.tensors import TensorEntry, check_tensors
from mmengine.models.decoder.config import DecoderConfig
from mmengine.models.decoder.tensors import EMBEDDING, HEAD, NORM, decoder_tensors

FC = "mtp.fc.weight"
EMBEDDING_NORM, HIDDEN_NORM = "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight"
TARGET_NORM = "target.norm.weight"  # The target's final norm, which the head applies to its input.
_STORED = re.compile(r"(?:model\.)?mtp\.")
_DECODER = ("layers.", "norm.")


@dataclass(frozen=True, slots=True)
class MtpHead:
    """A checkpoint's MTP head. `decoder`: the head's layer, with the target's sizes. `target_layers`: the
    target's number of layers. `entries`: checked entries for the head's tensors and the target's final norm.
    """

    decoder: DecoderConfig
    target_layers: int
    entries: dict[str, TensorEntry]


def is_mtp(stored: str) -> bool:
    """Return whether a stored tensor belongs to an MTP head."""
    return _STORED.match(stored) is not None


@dataclass(frozen=True, slots=True)
class MtpNames(TensorNames):
    """Maps stored names to the head's canonical names. `target`: the rules for the target's names."""

    target: TensorNames

    def canonical(self, stored: str) -> str | None:
        if (found := _STORED.match(stored)) is None:
            return TARGET_NORM if self.target.canonical(stored) == NORM else None
        name = stored[found.end() :]
        return f"text.{name}" if name.startswith(_DECODER) else f"mtp.{name}"


def open_mtp_head(
    folder: Path, target: TensorNames, decoder: DecoderConfig, target_layers: int
) -> MtpHead | None:
    """Return the MTP head in the model's files, or None if the files have none. Reads no weights.

    `decoder`: the config of the head's layer. Raises ModelError for missing, misshapen or unexpected tensors.
    """
    entries = MtpNames((), target).entries(folder)
    if not entries.keys() - {TARGET_NORM}:
        return None
    if (experts := decoder.experts) is not None:
        entries = each_expert(entries, experts.count, decoder.hidden_size, experts.intermediate_size)
    size = decoder.hidden_size
    expected = decoder_tensors(decoder) | {
        FC: (size, 2 * size),
        **dict.fromkeys((EMBEDDING_NORM, HIDDEN_NORM, TARGET_NORM), (size,)),
    }
    del expected[EMBEDDING], expected[HEAD]
    entries = without_zero_biases(entries, expected)
    check_tensors(folder, entries, expected)
    return MtpHead(decoder, target_layers, entries)
