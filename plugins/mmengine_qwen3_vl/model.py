"""The networks of one model on one device, behind the protocol VisionLanguageModel."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from mmengine.errors import ConfigError, ModelError
from mmengine.gpu.text_ops import text_ops
from mmengine.models.plugin import AttentionPort, ModelSpec, Taps
from mmengine.models.reader import WeightReader
from mmengine.native import library as native
from mmengine_qwen3_vl.config import ModelConfig, TextConfig, read_config
from mmengine_qwen3_vl.fused_text import FusedTextDecoder
from mmengine_qwen3_vl.loading import open_weights
from mmengine_qwen3_vl.native_text import NativeTextDecoder, fits
from mmengine_qwen3_vl.text import TextDecoder
from mmengine_qwen3_vl.vision import VisionTower

AnyTextDecoder = TextDecoder | NativeTextDecoder | FusedTextDecoder
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Qwen3VL:
    """Vision tower and text decoder. `device` and `dtype` are those of weights and hidden states."""

    def __init__(
        self,
        config: ModelConfig,
        text: AnyTextDecoder,
        vision: VisionTower,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.config, self.device, self.dtype = config, device, dtype
        self.spec = make_spec(config)
        self._text, self._vision = text, vision

    def encode(self, patches: Tensor, grids: Sequence[tuple[int, int, int]]) -> Tensor:
        return self._vision.encode(patches, grids)

    def embed(self, input_ids: Tensor) -> Tensor:
        return self._text.embed(input_ids)

    def forward(
        self,
        embeds: Tensor,
        deepstack: Tensor | None,
        positions: Tensor,
        attention: AttentionPort,
        taps: Taps | None = None,
    ) -> Tensor:
        return self._text.forward(embeds, deepstack, positions, attention, taps)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._text.logits(hidden)


def load_model(folder: Path, *, device: str, dtype: str) -> Qwen3VL:
    """The model of `folder`, weights cast to `dtype` ("float32", "bfloat16", "float16").

    Raises ModelError for a folder that cannot be served, ConfigError for a device or dtype that
    cannot be used.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    try:
        where = torch.device(device)
        torch.empty(1, device=where)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"device {device!r} cannot be used here: {reason}") from None
    config = read_config(folder)
    try:
        with torch.inference_mode(), open_weights(folder, config, where, DTYPES[dtype]) as weights:
            text = text_decoder(config.text, weights, where, DTYPES[dtype])
            vision = VisionTower(config.vision, weights, where)
    except torch.OutOfMemoryError:
        raise ModelError(f"{folder} does not fit the memory of {device} in {dtype}") from None
    return Qwen3VL(config, text, vision, where, DTYPES[dtype])


def text_decoder(
    config: TextConfig, weights: WeightReader, device: torch.device, dtype: torch.dtype
) -> AnyTextDecoder:
    if device.type == "cuda":
        return FusedTextDecoder(config, weights, device, text_ops(device, dtype))
    library = native.load() if fits(config, device, dtype) else None
    if library is None:
        return TextDecoder(config, weights, device)
    return NativeTextDecoder(config, weights, library)


def make_spec(config: ModelConfig) -> ModelSpec:
    """The sizes that the runtime and the scheduler need."""
    text, vision = config.text, config.vision
    return ModelSpec(
        num_layers=text.num_layers,
        num_heads=text.num_heads,
        num_kv_heads=text.num_kv_heads,
        head_dim=text.head_dim,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        max_model_len=text.max_positions,
        num_deepstack=len(vision.deepstack_layers),
        patch_width=vision.patch_width,
    )
