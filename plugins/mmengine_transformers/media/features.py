"""Computes the embeddings of media items with a model's own vision tower, one item at a time."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmengine.errors import ModelError, in_one_line
from mmengine_transformers.media.packing import ROW_BYTES, Packed, unpack

_PROBE_SIDE = 96  # Side length of the sample image, in pixels.
_KEPT = "video_compression_mask"
Features = Callable[..., Any]


class MediaEncoder:
    """Encodes packed items. `sample`: a packed sample item, with which the constructor checks the encoder
    and the engine measures memory. `indicators`: the ids of the tokens whose embeddings are constants.

    Raises ModelError for a model whose features cannot be computed item by item.
    """

    patch_width = ROW_BYTES
    merge_size = 1

    def __init__(self, model: Any, sample: Tensor, indicators: Sequence[int] = ()) -> None:
        self._model, self._indicators = model, indicators
        self._features: Mapping[str, Features] = {
            "pixel_values": _method(model, "get_image_features"),
            "pixel_values_videos": _method(model, "get_video_features"),
        }
        self._dtype = model.dtype
        self._device = model.device
        self._sample = sample
        self.num_deepstack = self.check(sample, "image")

    def encode(self, patches: Tensor, grids: Sequence[tuple[int, int, int]]) -> Tensor:
        """Return the features [n, (1 + num_deepstack) * hidden] of the items packed in `patches`, uint8 [p,
        patch_width]. If the first row of `patches` is zero, the engine is measuring memory. The method then
        encodes the sample repeatedly, up to the total size in `grids`.
        """
        rows = patches.cpu()
        if not rows[0].any():
            return self._encode_samples(sum(t * h * w for t, h, w in grids))
        return torch.cat([self._encode_item(item) for item in unpack(rows.numpy())])

    def _encode_samples(self, num_embeds: int) -> Tensor:
        (item,) = unpack(self._sample.numpy())
        count = -(-num_embeds // item.header.num_embeds)
        return torch.cat([self._encode_item(item) for _ in range(count)])[:num_embeds]

    def check(self, sample: Tensor, modality: str) -> int:
        """Encode a sample item alone, and return its number of deepstack features. Raises ModelError."""
        (item,) = unpack(sample.numpy())
        name = type(self._model).__name__
        try:
            features = self._encode_item(item)
        except ModelError:
            raise
        except Exception as error:  # Third-party modules may raise any exception.
            raise ModelError(
                f"{name} cannot encode one {modality} alone: {in_one_line(error, 200)}"
            ) from error
        width = self._model.get_input_embeddings().weight.shape[1]
        if len(features) != item.header.num_embeds or features.shape[1] % width:
            raise ModelError(
                f"{name} gives {len(features)} embeddings of width {features.shape[1]} for {modality} input "
                f"with {item.header.num_embeds} placeholders, so its features cannot be split by item"
            )
        return int(features.shape[1] // width - 1)

    def _encode_item(self, item: Packed) -> Tensor:
        key = next((name for name in self._features if name in item.arrays), "pixel_values")
        method = self._features[key]
        taken = inspect.signature(method).parameters
        tensors = {
            entry.name: self._tensor(entry.dtype, item.arrays[entry.name]) for entry in item.header.tensors
        }
        out = method(**{name: value for name, value in tensors.items() if name in taken}, return_dict=True)
        if self._model.config.model_type == "llama4":  # `method` does not apply the projector.
            features = self._model.multi_modal_projector(_joined(out.last_hidden_state))
        else:
            features = _joined(getattr(out, "pooler_output", out))
        if _KEPT in tensors:  # VideoLLaMA 3 drops unchanged patches.
            features = features[tensors[_KEPT].bool()]
        if (
            self._model.config.model_type == "molmo2"
        ):  # Molmo2 adds the features to the placeholder's embedding.
            features = features + self._embeddings([self._model.config.image_token_id])
        deepstack = getattr(out, "deepstack_features", None)
        if deepstack is not None and len(deepstack):
            features = torch.cat([features, *map(_joined, deepstack)], dim=1)
        return self._placed(features.to(self._dtype), out, item)

    def _placed(self, features: Tensor, out: Any, item: Packed) -> Tensor:
        """Insert the indicators' constant embeddings, and return all embeddings in placeholder order."""
        if not item.header.indicators:
            return features
        constants = getattr(out, "visual_indicator_features", None)
        constants = self._embeddings(self._indicators) if constants is None else constants.to(features)
        whole = features.new_empty(item.header.num_embeds, features.shape[1])
        is_feature = torch.ones(len(whole), dtype=torch.bool, device=features.device)
        for place, number in item.header.indicators:
            whole[place], is_feature[place] = constants[number], False
        whole[is_feature] = features
        return whole

    def _embeddings(self, token_ids: Sequence[int]) -> Tensor:
        rows: Tensor = self._model.get_input_embeddings()(torch.tensor(token_ids, device=self._device))
        return rows

    def _tensor(self, dtype: str, stored: Any) -> Tensor:
        values = torch.from_numpy(stored.copy())
        if dtype == "bfloat16":
            values = values.view(torch.bfloat16)
        values = values.to(self._device)
        return values.to(self._dtype) if values.is_floating_point() else values


def _method(model: Any, name: str) -> Features:
    """Return the feature method `name` from `model.model` or from `model`."""
    for owner in (getattr(model, "model", None), model):
        found = getattr(owner, name, None)
        if found is not None:
            return found
    return _refuse(type(model).__name__, name)


def _refuse(model: str, name: str) -> Features:
    def refuse(**_: Tensor) -> None:
        raise ModelError(f"{model} has no method {name}, with which items are encoded")

    return refuse


def _joined(features: Any) -> Tensor:
    """Return the features of tiles or items as one tensor [n, width]."""
    if isinstance(features, (list, tuple)):
        return torch.cat([each.reshape(-1, each.shape[-1]) for each in features])
    return features.reshape(-1, features.shape[-1])
