"""A VisionLanguageModel with transformers' modules as decoder and head."""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from mmengine.errors import ConfigError, ModelError, in_one_line
from mmengine.models.decoder.positions import text_positions
from mmengine.models.network import DTYPES
from mmengine.models.plugin import AttentionPort, AuxHiddenStates, LayerAttention, ModelSpec
from mmengine.models.progress import report_step
from mmengine.models.quantising import Activations, Quantize
from mmengine.models.states import StepStates
from mmengine.request import MediaItem
from mmengine_transformers.attention import (
    ATTRIBUTE,
    NAME,
    Heads,
    HostedLayer,
    StepContext,
    use_attention,
)
from mmengine_transformers.body import DecoderBody
from mmengine_transformers.calls import (
    RECORDER,
    AttentionCall,
    layers_of,
    pool_heads,
    recording,
    with_value_sizes,
)
from mmengine_transformers.classes import read_model, rotary_limit, text_config
from mmengine_transformers.head import Head
from mmengine_transformers.layer_rules import temperature_limit, with_rules
from mmengine_transformers.masks import check_cache, check_masks
from mmengine_transformers.media.features import MediaEncoder
from mmengine_transformers.media.opening import open_encoder
from mmengine_transformers.media.positions import grid_positions
from mmengine_transformers.media.rules import media_rules
from mmengine_transformers.norms import fuse_norms
from mmengine_transformers.packed import kernels_for
from mmengine_transformers.parts import ModelParts, parts_of
from mmengine_transformers.probe import check_logits, own_logits
from mmengine_transformers.weights import build_empty, load_weights

PROBE_TOKENS = 8
_log = logging.getLogger("mmengine.models")


class HostedNetwork:
    """A transformers model on a device."""

    batch_invariant = False

    def __init__(
        self, parts: ModelParts, spec: ModelSpec, body: DecoderBody, head: Head, encoder: MediaEncoder | None
    ) -> None:
        self.spec, self._parts, self._body, self._head = spec, parts, body, head
        self._encoder = encoder
        self._input_ids = torch.empty(0, dtype=torch.int64)  # token ids of the current step

    def encode(self, patches: Tensor, grids: Sequence[tuple[int, int, int]]) -> Tensor:
        """See VisionLanguageModel. Raises ModelError for a text model."""
        if self._encoder is None:
            raise ModelError("this model takes no images")
        return self._encoder.encode(patches, grids)

    def positions(self, prompt_token_ids: np.ndarray, media: Sequence[MediaItem]) -> tuple[np.ndarray, int]:
        """See ModelPlugin.positions."""
        grid = self._body.grid_positions
        return text_positions(len(prompt_token_ids)) if grid is None else grid(prompt_token_ids, media)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings [t, hidden] of token ids, int64 [t]."""
        self._input_ids = input_ids
        return self._parts.embedding(input_ids)

    def forward(
        self,
        embeds: Tensor,
        deepstack: Tensor | None,
        positions: Tensor,
        attention: AttentionPort,
        aux_hidden_states: AuxHiddenStates | None = None,
        states: StepStates | None = None,
    ) -> Tensor:
        """See VisionLanguageModel. Raises ConfigError if `aux_hidden_states` is set (for a draft head)."""
        if aux_hidden_states is not None:
            raise ConfigError(
                "draft heads need a native implementation, and this model runs on modules of transformers; "
                "use spec none or ngram"
            )
        report_step()
        return self._body(self._input_ids, embeds, positions, attention, deepstack)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)


def load_network(
    folder: Path, *, device: str, dtype: str, quantize: Quantize = "none", activations: Activations = "model"
) -> HostedNetwork:
    """Load and check a folder's model. Raises ModelError for an unsupported model, and ConfigError for an
    unsupported device, dtype or quantisation.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    where, kind = torch.device(device), DTYPES[dtype]
    if quantize != "none" and kernels_for(where, kind) is None:
        raise ConfigError(f"quantize {quantize} needs the CPU's kernels; leave quantize out")
    config, model_class = read_model(folder)
    model = build_empty(model_class, config, kind)
    held = load_weights(model, folder, where, kind, quantize, activations)
    try:
        with torch.inference_mode():
            return _checked(model, folder, where, kind, held)
    except (ModelError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # Other authors' modules may raise any exception.
        raise ModelError(
            f"{type(model).__name__} cannot be served: its modules fail in a test at load: "
            f"{in_one_line(error, 200)}"
        ) from error


def _checked(
    model: PreTrainedModel, folder: Path, device: torch.device, dtype: torch.dtype, held: str
) -> HostedNetwork:
    """Check a loaded model (modules `masks` and `probe`), and return its network. Raises ModelError."""
    parts, context = parts_of(model), StepContext()
    calls, layers = record_layers(parts, device)
    pool = pool_heads(type(model).__name__, calls)
    layers = with_value_sizes(layers, calls, pool)
    for index, (call, layer) in enumerate(zip(calls, layers, strict=True)):
        setattr(call.module, ATTRIBUTE, HostedLayer(index, layer, call.heads, pool, call.scale, context))
    body, head = DecoderBody(parts, context, grid_positions(model)), Head(parts)
    # The checks require causal masks and chunked prompts. Skip the checks if all prompt tokens see one
    # another.
    if media_rules(model.config).runs == "prompt":
        fuse_norms(parts.decoder, device, dtype)
    else:
        check_cache(parts, layers)
        check_masks(parts, layers, device)
        own = own_logits(parts, device)
        fuse_norms(parts.decoder, device, dtype)
        check_logits(own, parts, body, head, layers)
    use_attention(parts.decoder, NAME)
    encoder = open_encoder(model, folder)
    return HostedNetwork(parts, spec_of(parts, pool, layers, held, encoder), body, head, encoder)


def record_layers(
    parts: ModelParts, device: torch.device
) -> tuple[list[AttentionCall], tuple[LayerAttention, ...]]:
    """Run the decoder on a few tokens. Return its attention calls, and the layers derived from the calls."""
    embeds = parts.embedding(torch.arange(1, PROBE_TOKENS + 1, device=device))[None]
    positions = torch.arange(PROBE_TOKENS, device=device)[None]
    use_attention(parts.decoder, RECORDER)
    with recording(parts.decoder) as calls:
        parts.decoder(inputs_embeds=embeds, position_ids=positions, use_cache=False, attention_mask=None)
    name = type(parts.model).__name__
    num_layers = text_config(parts.model.config).num_hidden_layers
    config = parts.model.config
    is_causal = media_rules(config).runs != "prompt"
    layers = layers_of(name, calls, num_layers, PROBE_TOKENS, is_causal=is_causal)
    return calls, with_rules(layers, config)


def spec_of(
    parts: ModelParts,
    pool: Heads,
    layers: tuple[LayerAttention, ...],
    held: str = "",
    encoder: MediaEncoder | None = None,
) -> ModelSpec:
    """Return a model's sizes. `pool`: the KV pool's heads. `held`: describes the quantised matrices' format
    in memory, or "".
    """
    config = text_config(parts.model.config)
    longest = int(getattr(config, "max_position_embeddings", None) or 4096)
    limit = rotary_limit(config)
    if limit and limit < longest:
        _log.warning("max_model_len is at most %d: longer rows change the rotary factors of all rows", limit)
        longest = limit
    limit = temperature_limit(parts.model.config)
    if limit and limit < longest:
        _log.warning(
            "max_model_len is at most %d: the model gives later tokens an attention temperature, which is "
            "not supported",
            limit,
        )
        longest = limit
    rules = media_rules(parts.model.config)
    is_plain = all(layer == LayerAttention(index) for index, layer in enumerate(layers))
    return ModelSpec(
        num_layers=len(layers),
        num_heads=pool.num_heads,
        num_kv_heads=pool.num_kv_heads,
        head_dim=pool.head_dim,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_model_len=longest,
        num_deepstack=0 if encoder is None else encoder.num_deepstack,
        patch_width=0 if encoder is None else encoder.patch_width,
        merge_size=1,
        weights_held=held,
        attention=() if is_plain else layers,
        runs=rules.runs if encoder is not None else "",
        atomic_runs=rules.atomic_runs,
        whole_prompt=rules.whole_prompt,
    )
