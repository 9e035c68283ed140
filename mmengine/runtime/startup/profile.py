"""Measures how much memory the largest step needs in addition to the weights, by running this step before the
KV pool exists.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mmengine.config import EngineConfig
from mmengine.errors import ConfigError
from mmengine.models.plugin import AuxHiddenStates, ModelSpec, VisionLanguageModel
from mmengine.runtime.device.port import Meter
from mmengine.runtime.graphs.encoder_sizes import MOST_EMBEDS

# Memory that filters need, in copies of the float32 logits: scaled, sorted, token ids (int64, so they count
# twice), cumulative sums.
SAMPLING_COPIES = 5


@dataclass(frozen=True, slots=True)
class Peaks:
    """The measured peaks of memory use."""

    layers: int  # bytes for layers, logits and sampling with token_budget tokens
    encoder: int  # bytes for the encoder with encoder_budget embeddings
    graphs: int = 0  # bytes for the largest captured step's layers and the largest captured encoder pass


class _NoCache:
    """Replaces attention during the measurement. Returns zeros with the right shape."""

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store nothing."""

    def run(self, layer: int, q: Tensor, sinks: Tensor | None = None) -> Tensor:
        return torch.zeros_like(q, memory_format=torch.contiguous_format)


def measure(
    model: VisionLanguageModel,
    config: EngineConfig,
    device: torch.device,
    meter: Meter,
    *,
    aux_hidden_states: tuple[int, ...] = (),
    captures: bool = False,
) -> Peaks:
    """Run the encoder and the layers for the largest step, and return their peak memory use.

    If the engine `captures` graphs, the sizes of the largest graphs are measured too.
    `aux_hidden_states`: the layers whose states a draft head reads. Raises ConfigError if a pass does not fit
    next to the weights.
    """
    budget, rows = config.token_budget, config.max_num_seqs * (1 + config.num_draft_tokens)
    sampled, graphs, encoder = min(rows, budget), 0, 0
    with torch.inference_mode():
        if model.spec.has_encoder:
            encoder = _peak(
                meter, config, "encoder_budget", lambda: _encode(model, config, config.encoder_budget, device)
            )
        layers = _peak(
            meter, config, "token_budget", lambda: _layers(model, budget, sampled, device, aux_hidden_states)
        )
        if captures:
            graphs = _peak(
                meter, config, "max_num_seqs", lambda: _layers(model, rows, 0, device, aux_hidden_states)
            )
        if captures and model.spec.has_encoder:
            embeds = min(config.encoder_budget, MOST_EMBEDS)
            graphs += _peak(meter, config, "encoder_budget", lambda: _encode(model, config, embeds, device))
    return Peaks(layers + SAMPLING_COPIES * 4 * sampled * model.spec.vocab_size, encoder, graphs)


def _peak(meter: Meter, config: EngineConfig, setting: str, run: Callable[[], None]) -> int:
    meter.reset()
    try:
        run()
    except torch.OutOfMemoryError:
        raise ConfigError(
            f"the largest step does not fit next to the weights: {setting} {getattr(config, setting)} needs "
            f"more memory than is free; lower {setting}"
        ) from None
    return meter.peak()


def _layers(
    model: VisionLanguageModel,
    count: int,
    rows: int,
    device: torch.device,
    aux_hidden_states: tuple[int, ...],
) -> None:
    """Compute all layers over `count` tokens, and the logits for `rows` tokens."""
    spec = model.spec
    embeds = model.embed(torch.zeros(count, dtype=torch.int64, device=device))
    deepstack = embeds.new_zeros(spec.num_deepstack, count, spec.hidden_size) if spec.num_deepstack else None
    positions = torch.zeros(3, count, dtype=torch.int64, device=device)
    asked = (
        (
            AuxHiddenStates(
                aux_hidden_states, embeds.new_empty(count, len(aux_hidden_states) * spec.hidden_size)
            ),
        )
        if aux_hidden_states
        else ()
    )
    hidden = model.forward(embeds, deepstack, positions, _NoCache(), *asked)
    if rows:
        model.logits(hidden[:rows])


def _encode(model: VisionLanguageModel, config: EngineConfig, num_embeds: int, device: torch.device) -> None:
    grids = grids_of(num_embeds, config.largest_item, model.spec)
    num_patches = sum(t * h * w for t, h, w in grids)
    patches = torch.zeros(num_patches, model.spec.patch_width, dtype=torch.uint8, device=device)
    model.encode(patches, grids)


def grids_of(num_embeds: int, largest: int, spec: ModelSpec) -> list[tuple[int, int, int]]:
    """Return the patch grids (t, h, w) for the smallest number of images with nearly `num_embeds` embeddings
    in total.

    Each image has at most `largest` embeddings. A few large images need more memory than many small images.
    """
    grids, left = [], num_embeds
    while left > 0:
        high = math.isqrt(min(left, largest))
        wide = min(left, largest) // high
        grids.append((1, high * spec.merge_size, wide * spec.merge_size))
        left -= min(left, largest)
    return grids
