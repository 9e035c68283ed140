"""Limits the encoder work in a step, based on the encoder's measured speed."""

import msgspec
import torch

from mmengine.config import EngineConfig
from mmengine.errors import ConfigError
from mmengine.models.plugin import VisionLanguageModel

# Target time for one part of an item, in ns. In this time, other rows decode only one token, so a longer time
# would be a visible pause. With a much shorter time, a step's fixed cost would be a large share of the step.
PIECE_NS = 10**9


def with_encoder_pace(config: EngineConfig, model: VisionLanguageModel, num_threads: int) -> EngineConfig:
    """Return `config` with values for encoder_piece, encoder_even_patches and encoder_work_ns.

    Unset settings get measured values. They stay unset if the encoder cannot pause within an item, or if
    `compat` (vLLM's decisions) or `whole_prompt` is set. In these cases, raises ConfigError if encoder_piece
    is set.
    """
    measure = getattr(model, "measure_encoder", None)
    if config.compat or config.whole_prompt or measure is None:
        return _without_pieces(config)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        cost = measure()
    finally:
        torch.set_num_threads(before)
    if cost is None:
        return _without_pieces(config)
    work_ns = config.encoder_work_ns or cost.work_ns
    return msgspec.structs.replace(
        config,
        encoder_piece=config.encoder_piece or max(1, PIECE_NS // work_ns),
        encoder_even_patches=config.encoder_even_patches or cost.even_patches,
        encoder_work_ns=work_ns,
    )


def _without_pieces(config: EngineConfig) -> EngineConfig:
    if config.encoder_piece:
        raise ConfigError(
            f"encoder_piece {config.encoder_piece} is not supported: this model's encoder cannot pause "
            "within an image on this device; set encoder_piece 0"
        )
    return config
