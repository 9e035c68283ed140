"""Make a Qwen3-VL of a given shape with random weights, directly on the device, for checks and timing."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from mmengine.checkpoint.rope import RopeConfig
from mmengine.models.decoder.config import DecoderConfig
from mmengine.models.network import Network, text_decoder
from mmengine.models.vision.config import VisionConfig
from mmengine.models.vision.tower import VisionTower
from mmengine.models.weights import expected_tensors
from mmengine.native.linear import ChunkedCodes, ChunkedWeight
from mmengine_qwen3_vl.config import ModelConfig


def _rope(*sections: int) -> RopeConfig:
    return RopeConfig(5e6, sections=sections, interleaved=True)


def _shape(text: dict[str, object], vision: dict[str, object]) -> ModelConfig:
    """Return a model configuration with the fields that all sizes share, plus `text` and `vision`."""
    return ModelConfig(
        text=DecoderConfig(
            vocab_size=151_936,
            num_kv_heads=8,
            head_dim=128,
            max_positions=262_144,
            rms_norm_eps=1e-6,
            rope=_rope(24, 20, 20),
            qk_norm=True,
            **text,
        ),
        vision=VisionConfig(
            num_heads=16,
            out_hidden_size=text["hidden_size"],
            in_channels=3,
            patch_size=16,
            temporal_patch_size=2,
            merge_size=2,
            num_positions=2304,
            rope_theta=10_000.0,
            norm_eps=1e-6,
            gelu="tanh",
            **vision,
        ),
        image_token_id=151_655,
        video_token_id=151_656,
    )


# The sizes are not copied from published configs. Only the shared fields in `_shape` were compared with a
# published config (4B), and they agree.
SHAPES = {
    "2B": _shape(
        {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_layers": 28,
            "num_heads": 16,
            "tied": True,
        },
        {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_layers": (5, 11, 17)},
    ),
    "8B": _shape(
        {
            "hidden_size": 4096,
            "intermediate_size": 12_288,
            "num_layers": 36,
            "num_heads": 32,
            "tied": False,
        },
        {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "deepstack_layers": (8, 16, 24)},
    ),
}


def reduced(shape: ModelConfig) -> ModelConfig:
    """Return the shape with fewer and narrower layers, for a dry run."""
    narrow = {"hidden_size": 64, "intermediate_size": 128}
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "rope": _rope(6, 5, 5)}
    text = replace(shape.text, vocab_size=512, num_layers=2, **heads, **narrow)
    vision = replace(
        shape.vision, depth=3, num_heads=4, out_hidden_size=64, deepstack_layers=(0, 1), **narrow
    )
    return replace(shape, text=text, vision=vision, image_token_id=1, video_token_id=2)


def wide_shape(num_heads: int) -> ModelConfig:
    """Return a small model's shape with two KV heads and a head size of 128, as in real models."""
    shape = reduced(SHAPES["2B"])
    wide = {"num_heads": num_heads, "num_kv_heads": 2, "head_dim": 128, "rope": _rope(24, 20, 20)}
    return replace(shape, text=replace(shape.text, **wide))


class RandomWeights:
    """Replaces mmengine.models.reader.WeightReader in checks and timing. Norm weights are 1. Matrices have
    small random values, so no result overflows.
    """

    def __init__(self, shape: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self._shapes = expected_tensors(shape)
        if shape.text.tied:
            del self._shapes["lm_head.weight"]
        self._device, self._dtype = device, dtype
        self._generator = torch.Generator(device).manual_seed(0)

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def read(self, *names: str) -> torch.Tensor:
        shapes = [self._shapes[name] for name in names]
        shape = (sum(one[0] for one in shapes), *shapes[0][1:])
        if len(shape) == 1:
            return torch.ones(shape, device=self._device, dtype=self._dtype)
        out = torch.empty(shape, device=self._device, dtype=self._dtype)
        return out.normal_(0, 0.02, generator=self._generator)

    def read_each(self, groups: Sequence[Sequence[str]]) -> torch.Tensor:
        return torch.stack([self.read(*names) for names in groups])

    def pieces(self, *names: str) -> ChunkedWeight:
        return ChunkedWeight.of(self.read(*names).flatten(1))

    def held(self, *names: str, alike: bool = False) -> ChunkedWeight:
        """Return the joined matrix. `alike` has no effect, because no weight is quantised."""
        return self.pieces(*names)

    def held_each(self, groups: Sequence[Sequence[str]]) -> list[ChunkedWeight | ChunkedCodes]:
        return [self.pieces(*names) for names in groups]

    def keeps_blocks(self, name: str) -> bool:
        return False


def random_model(
    shape: ModelConfig, device: str, dtype: torch.dtype, *, batch_invariant: bool = False
) -> Network:
    where = torch.device(device)
    with torch.inference_mode():
        weights = RandomWeights(shape, where, dtype)
        text = text_decoder(shape.text, weights, where, dtype, batch_invariant=batch_invariant)
        vision = VisionTower(shape.vision, weights, where)
    return Network(shape, text, vision, where, dtype)
