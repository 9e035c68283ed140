"""How much of the encoder a step may take on: from how fast it is here."""

import msgspec
import torch

from mmengine.config import EngineConfig
from mmengine.errors import ConfigError
from mmengine.models.plugin import VisionLanguageModel

# What a part of an item takes, beside which others decode one token: not longer than somebody who reads along
# waits for one, and long enough that what a step costs by itself does not count.
PIECE_NS = 10**9


def with_encoder_pace(config: EngineConfig, model: VisionLanguageModel, num_threads: int) -> EngineConfig:
    """`config` with what it leaves open of encoder_piece, encoder_even_patches and encoder_work_ns, measured
    on so many threads. All stay as they are where the encoder cannot stop within an item, and with vLLM's
    decisions. Raises ConfigError where a piece is asked for there."""
    measure = getattr(model, "measure_encoder", None)
    if config.compat or measure is None:
        return _whole(config)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        cost = measure()
    finally:
        torch.set_num_threads(before)
    if cost is None:
        return _whole(config)
    work_ns = config.encoder_work_ns or cost.work_ns
    return msgspec.structs.replace(
        config,
        encoder_piece=config.encoder_piece or max(1, PIECE_NS // work_ns),
        encoder_even_patches=config.encoder_even_patches or cost.even_patches,
        encoder_work_ns=work_ns,
    )


def _whole(config: EngineConfig) -> EngineConfig:
    if config.encoder_piece:
        raise ConfigError(
            f"encoder_piece {config.encoder_piece} cannot be had: this model has no encoder here that stops "
            "within an image; set encoder_piece 0"
        )
    return config
