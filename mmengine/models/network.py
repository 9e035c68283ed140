"""Implements the protocol VisionLanguageModel with a text decoder and a vision tower."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from mmengine.checkpoint.names import TensorNames
from mmengine.checkpoint.peft import AdapterFiles
from mmengine.errors import ConfigError, ModelError
from mmengine.gpu.text_ops import text_ops
from mmengine.models.adapter_modules import adapter_modules
from mmengine.models.config import NetworkConfig, make_spec
from mmengine.models.decoder.config import DecoderConfig
from mmengine.models.decoder.fused_text import FusedTextDecoder
from mmengine.models.decoder.native_text import NativeTextDecoder, delta_sizes
from mmengine.models.decoder.sharding import cut_config
from mmengine.models.decoder.text import TextDecoder
from mmengine.models.lora.adapter import AdapterRows, LoadedAdapter
from mmengine.models.lora.tensors import AdapterTensors
from mmengine.models.plugin import AttentionPort, AuxHiddenStates, EncoderCost, EncoderSize
from mmengine.models.quantising import Activations, Quantize
from mmengine.models.reader import WeightReader
from mmengine.models.sharding import Shard
from mmengine.models.states import StepStates
from mmengine.models.vision.captured_tower import CapturedVision
from mmengine.models.vision.lora_tower import adapted_tower
from mmengine.models.vision.tower import VisionTower
from mmengine.models.vision.tower_cost import measure_tower
from mmengine.models.vision.tower_pass import TowerPass
from mmengine.models.weights import open_weights
from mmengine.native import library as native
from mmengine.native.decoder_weights import fits

AnyTextDecoder = TextDecoder | NativeTextDecoder  # FusedTextDecoder is a subclass of TextDecoder.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Network:
    """A VisionLanguageModel that consists of a text decoder and a vision tower.

    `vision`: None if the model has no vision tower, or if another rank has the tower. `device`, `dtype`: for
    weights and hidden states.
    """

    def __init__(
        self,
        config: NetworkConfig,
        text: AnyTextDecoder,
        vision: VisionTower | None,
        device: torch.device,
        dtype: torch.dtype,
        weights_held: str = "",
    ) -> None:
        self.config, self.device, self.dtype = config, device, dtype
        self.spec = replace(make_spec(config), weights_held=weights_held)
        self.batch_invariant = text.batch_invariant
        self._text, self._vision = text, vision

    def encode(
        self,
        patches: Tensor,
        grids: Sequence[tuple[int, int, int]],
        adapter: LoadedAdapter | None = None,
    ) -> Tensor:
        if self._vision is None:
            raise ModelError(
                "this model has no vision tower"
                if self.config.vision is None
                else "the vision tower is on rank 0, not on this one"
            )
        return self._tower(self._vision, adapter).encode(patches, grids)

    def encode_in_parts(
        self,
        patches: Tensor,
        grid: tuple[int, int, int],
        even_patches: int,
        adapter: LoadedAdapter | None = None,
    ) -> TowerPass:
        if self._vision is None:
            raise ModelError("there is no vision tower here")
        return TowerPass(self._tower(self._vision, adapter), patches, grid, even_patches)

    @staticmethod
    def _tower(vision: VisionTower, adapter: LoadedAdapter | None) -> VisionTower:
        own = adapter.vision if adapter is not None else None
        return own if isinstance(own, VisionTower) else vision

    def adapter(self, files: AdapterFiles) -> LoadedAdapter:
        tensors = AdapterTensors(files, adapter_modules(self.config), self.device, self.dtype)
        with torch.inference_mode():
            vision = None
            if self._vision is not None and files.is_visual:
                vision = adapted_tower(self._vision, tensors)
            return LoadedAdapter(self._text.adapter(tensors), vision)

    def measure_encoder(self) -> EncoderCost | None:
        """Return the encoder's measured cost, or None without a vision tower or on a GPU. A GPU encodes no
        item in parts, so the cost is not needed.
        """
        vision = self._vision
        return None if vision is None or vision.device.type != "cpu" else measure_tower(vision)

    def capturable_encoder(self, largest: EncoderSize) -> CapturedVision | None:
        """Return an encoder for CUDA graphs. Return None without a vision tower, or if the device has no
        attention kernel for frames of different lengths.
        """
        if self._vision is None or self._vision.ops is None:
            return None
        return CapturedVision(self._vision, self._vision.ops, largest)

    def embed(self, input_ids: Tensor) -> Tensor:
        return self._text.embed(input_ids)

    def forward(
        self,
        embeds: Tensor,
        deepstack: Tensor | None,
        positions: Tensor,
        attention: AttentionPort,
        aux_hidden_states: AuxHiddenStates | None = None,
        states: StepStates | None = None,
        adapters: Sequence[AdapterRows] = (),
    ) -> Tensor:
        return self._text.forward(
            embeds, deepstack, positions, attention, aux_hidden_states, states, adapters
        )

    def logits(self, hidden: Tensor) -> Tensor:
        return self._text.logits(hidden)


def load_network(
    folder: Path,
    whole: NetworkConfig,
    names: TensorNames,
    *,
    device: str,
    dtype: str,
    shard: Shard | None = None,
    batch_invariant: bool = False,
    quantize: Quantize = "none",
    activations: Activations = "model",
) -> Network:
    """Load a network from the weights in `folder`, cast to `dtype` ("float32", "bfloat16" or "float16").

    `shard`: load only this rank's shard. `batch_invariant`: use batch-invariant kernels on a GPU. `quantize`:
    weight format for the decoder's matrices (only on a CPU in bfloat16). `activations`: "int8" to quantise
    the input rows that are multiplied by integer codes.

    Raises ModelError for an unsupported model. Raises ConfigError for an unusable device or dtype, for
    kernels that do not run on the device, and if the model cannot be split over the ranks.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    try:
        where = torch.device(device)
        torch.empty(1, device=where)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"device {device!r} cannot be used here: {reason}") from None
    if quantize != "none" and not fits(whole.text.head_dim, where, DTYPES[dtype]):
        raise ConfigError(
            f"quantize {quantize} needs the CPU's kernels, which do not compute heads of "
            f"{whole.text.head_dim} in {dtype}; remove quantize"
        )
    config = whole if shard is None else replace(whole, text=cut_config(whole.text, shard))
    leads = shard is None or shard.leads
    opened = open_weights(folder, names, whole, where, DTYPES[dtype], shard, quantize, activations)
    try:
        with torch.inference_mode(), opened as weights:
            text = text_decoder(config.text, weights, where, DTYPES[dtype], shard, batch_invariant)
            vision = VisionTower(config.vision, weights, where) if config.vision and leads else None
            weights.check_activations()
            held = weights.how_held()
    except torch.OutOfMemoryError:
        total = torch.accelerator.get_memory_info(where)[1] / 2**30
        raise ModelError(
            f"the weights of {folder} in {dtype} do not fit into the memory of {device} ({total:.1f} GiB); "
            "use a GPU with more free memory, or several GPUs (tensor_parallel)"
        ) from None
    return Network(config, text, vision, where, DTYPES[dtype], held)


def text_decoder(
    config: DecoderConfig,
    weights: WeightReader,
    device: torch.device,
    dtype: torch.dtype,
    shard: Shard | None = None,
    batch_invariant: bool = False,
    has_vocabulary: bool = True,
) -> AnyTextDecoder:
    """Return the fastest text decoder that runs on `device`. Arguments and errors: as for load_network.

    `has_vocabulary`: False for a decoder without embedding and LM head, such as a draft head's layers.
    """
    plain = config.delta is None and not (config.gated or config.norm_offset or config.rotary_dim)
    if device.type != "cpu" and not plain:
        return TextDecoder(config, weights, device, has_vocabulary=has_vocabulary)
    if device.type != "cpu":
        if batch_invariant and config.experts is not None:
            raise ConfigError(
                "batch_invariant is not supported for experts on a GPU, because torch multiplies "
                "the experts, and its results depend on the batch; remove batch_invariant"
            )
        ops = text_ops(device, dtype, batch_invariant=batch_invariant)
        return FusedTextDecoder(config, weights, device, ops, shard)
    # The kernels compute all layers in a single call, but ranks exchange sums within a layer. So torch
    # computes a sharded decoder.
    sizes = delta_sizes(config)
    usable = shard is None and fits(config.head_dim, device, dtype) and (sizes is None or sizes.fits)
    library = native.load() if usable else None
    if library is None:
        return TextDecoder(config, weights, device, shard, has_vocabulary=has_vocabulary)
    return NativeTextDecoder(config, weights, library, has_vocabulary)
