"""Checks that this plugin applies the same attention windows as the model's masks.

This plugin reads a layer's window or chunk from the attention call and the config. The plugin would miss a
window that only the masks contain, and results would silently be wrong. As a check, the decoder therefore
runs once, on more tokens than the longest window. Stubs replace the layers and record their masks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from mmengine.errors import ModelError
from mmengine.models.spec import LayerAttention
from mmengine_transformers.attention import use_attention
from mmengine_transformers.classes import text_config
from mmengine_transformers.parts import ModelParts
from mmengine_transformers.reference_port import visible
from mmengine_transformers.token_inputs import TokenInputs

RECORDED = "mmengine_masks"
MIN_TOKENS, MAX_TOKENS = 24, 4200  # A mask of 4,200 tokens takes 18 MB. Longer windows are not tested.


def whole_mask(**options: Any) -> Tensor | None:
    """Return the mask in SDPA's format, even if the mask is plainly causal."""
    return sdpa_mask(**{**options, "allow_is_causal_skip": False})


AttentionMaskInterface.register(RECORDED, whole_mask)


def check_masks(parts: ModelParts, layers: tuple[LayerAttention, ...], device: torch.device) -> None:
    """Raise ModelError if a layer's mask for a prompt without media differs from its LayerAttention."""
    longest = max(max(layer.window, layer.chunk) for layer in layers)
    count = min(max(MIN_TOKENS, longest + 2), MAX_TOKENS)
    modules = _layer_modules(parts.decoder, len(layers))
    ids = torch.zeros(count, dtype=torch.int64, device=device)
    embeds = torch.zeros_like(parts.embedding(ids)[None])
    positions = torch.arange(count, device=device)[None]
    use_attention(parts.decoder, RECORDED)
    with _witnessed(modules) as masks:
        parts.decoder(
            inputs_embeds=embeds, position_ids=positions, use_cache=False, **TokenInputs(parts)(ids)
        )
    expected: dict[tuple[int, int], Tensor] = {}
    for number, (layer, mask) in enumerate(zip(layers, masks, strict=True)):
        kind = (layer.window, layer.chunk)
        if kind not in expected:
            expected[kind] = visible(layer, 0, count, device)
        if mask is not None and not torch.equal(mask[0, 0].expand(count, count), expected[kind]):
            raise ModelError(
                f"{type(parts.model).__name__} cannot be served: layer {number} sees other keys than its "
                "attention call and config say"
            )


def check_cache(parts: ModelParts, layers: tuple[LayerAttention, ...]) -> None:
    """Raise ModelError if transformers' cache has a window for a layer, and the layer's attention has no
    window or a different window.

    The cache always follows the config's window. Some models' masks and attention calls ignore this window,
    for example Moshi's. A cache window that is at least as long as the model's longest row is ignored.
    """
    text = text_config(parts.model.config)
    longest = int(getattr(text, "max_position_embeddings", None) or 0)
    for number, (layer, cached) in enumerate(zip(layers, DynamicCache(config=text).layers)):
        kept = int(getattr(cached, "sliding_window", None) or 0)
        seen = layer.window or layer.chunk
        if kept and kept != seen and not 0 < longest <= kept:
            raise ModelError(
                f"{type(parts.model).__name__} cannot be served: transformers' cache keeps {kept} tokens in "
                f"layer {number}, and attention sees {seen or 'all'}"
            )


def _layer_modules(decoder: nn.Module, num_layers: int) -> list[nn.Module]:
    """Return the decoder's layers. Raises ModelError if the layers are not in a single list."""
    lists = [each for each in decoder.children() if isinstance(each, nn.ModuleList)]
    found = [each for each in lists if len(each) == num_layers]
    if len(found) != 1:
        raise ModelError(f"{type(decoder).__name__} cannot be served: its layers are not one list")
    return list(found[0])


@contextmanager
def _witnessed(modules: list[nn.Module]) -> Iterator[list[Tensor | None]]:
    """Inside the context, the layers return their inputs, and the list collects the layers' masks."""
    masks: list[Tensor | None] = []

    def witness(hidden: Tensor, *given: object, attention_mask: Tensor | None = None, **_: object) -> Tensor:
        shaped = [each for each in given if isinstance(each, Tensor) and each.dtype == torch.bool]
        masks.append(attention_mask if attention_mask is not None else next(iter(shaped), None))
        return hidden

    for module in modules:
        module.forward = witness
    try:
        yield masks
    finally:
        for module in modules:
            del module.forward
