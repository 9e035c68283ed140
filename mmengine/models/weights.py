"""Checks the names and shapes of a model's tensors, and opens a reader for the weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from mmengine.checkpoint.int4 import without_zero_biases
from mmengine.checkpoint.names import TensorNames
from mmengine.checkpoint.stacked_experts import each_expert
from mmengine.checkpoint.tensors import check_tensors
from mmengine.errors import ModelError
from mmengine.models.config import NetworkConfig
from mmengine.models.decoder.sharding import axis_of, check_plan
from mmengine.models.decoder.tensors import HEAD, decoder_tensors
from mmengine.models.quantising import CODINGS, Activations, Quantize
from mmengine.models.reader import WHOLE, Part, WeightReader, open_reader
from mmengine.models.sharding import Shard
from mmengine.models.vision.tensors import vision_tensors


@contextmanager
def open_weights(
    folder: Path,
    names: TensorNames,
    config: NetworkConfig,
    device: torch.device,
    dtype: torch.dtype,
    shard: Shard | None = None,
    quantize: Quantize = "none",
    activations: Activations = "model",
) -> Iterator[WeightReader]:
    """Check all names and shapes, and yield a reader for the weights in a folder.

    With a `shard`, the reader returns only the shard's part of each tensor. `config` always describes the
    whole model. Raises ModelError for missing, wrong or superfluous tensors. Also raises ModelError if
    `quantize` is set for quantised weights.
    """
    entries = names.entries(folder)
    coding = CODINGS.get(quantize)
    if coding is not None and any(entry.coding is not None for entry in entries.values()):
        raise ModelError(f"the weights in {folder} are quantised already; remove quantize {quantize}")
    if (experts := config.text.experts) is not None:
        sizes = config.text.hidden_size, experts.intermediate_size
        entries = each_expert(entries, experts.count, *sizes)
    expected = expected_tensors(config)
    entries = without_zero_biases(entries, expected)
    check_tensors(folder, entries, expected, optional=[HEAD] if config.text.tied else [])
    part = WHOLE
    if shard is not None:
        check_plan(config.text, entries)
        part = Part(shard.rank, shard.size, axis_of)
    with open_reader(entries, device, dtype, part, coding, activations) as reader:
        yield reader


def expected_tensors(config: NetworkConfig) -> dict[str, tuple[int, ...]]:
    """Return each tensor's shape, by canonical name. Linear weights are [out, in]."""
    shapes = decoder_tensors(config.text)
    return shapes if config.vision is None else shapes | vision_tensors(config.vision)
