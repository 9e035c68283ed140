"""Defines the protocol for model plugins. A plugin provides a processor (numpy only) and the networks
(torch).

A plugin is an entry point in the group `mmengine.models`. Importing its module must be fast, so only
`load_model` may import torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

from mmengine.models.media_cache import MediaCache
from mmengine.models.media_decoding import DecoderRecipe, MediaDecoder
from mmengine.models.sharding import Shard
from mmengine.models.spec import LayerAttention as LayerAttention
from mmengine.models.spec import ModelSpec as ModelSpec
from mmengine.models.states import StepStates
from mmengine.request import CallFormat, MediaItem


@dataclass(frozen=True, slots=True)
class MediaSource:
    """An image or a video as sent by the client. `data`: the encoded bytes, or the path to a file with these
    bytes. `options`: the requested options (numbers or bools) by name.
    """

    data: bytes | Path
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class MediaInput:
    """A media item and its input for the encoder.

    `patches`: uint8 [num_patches, channels * temporal * patch²], in the encoder's order: patches in the same
    merge x merge window are adjacent. `source`: input for `Processor.restore`, or None if the client sent no
    encoded bytes.
    """

    item: MediaItem
    patches: np.ndarray
    source: MediaSource | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prompt that is ready to submit. `text`: the rendered prompt before media placeholders were
    expanded.
    """

    prompt_token_ids: np.ndarray  # int32 [n]
    media: tuple[MediaInput, ...]
    text: str
    # In a session: number of template tokens before the content. These tokens close a video or start a new
    # turn.
    num_opening: int = 0


class Tokenizer(Protocol):
    """The methods and attributes that serving needs from a tokenizer."""

    vocab_size: int  # `decode` accepts all ids below this number.
    special_ids: frozenset[int]

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self) -> list[bytes]:
        """Return the bytes that each id below vocab_size adds to a text. A special token adds its name, and
        an unused id adds b"".

        Grammars and logprobs use these bytes. Raises ModelError if a token's bytes cannot be determined.
        """

    # For faster detokenization, a tokenizer may have `text_bytes: Sequence[bytes] | None`: each id's bytes.
    # `decode` must then return the joined bytes, decoded as UTF-8 with U+FFFD for invalid bytes.


# Which turn a piece of a session starts: the first turn ("first"), a later turn ("next"), or no turn ("").
Opens = Literal["first", "next", ""]


class Processor(Protocol):
    """Converts messages and media to prompt tokens and patches. Never imports torch. Thread-safe."""

    eos_token_ids: tuple[int, ...]
    generation_defaults: dict[str, Any]  # The sampling defaults in generation_config.json.
    fingerprint: str  # A hex digest. With equal digests, equal input gives equal pixels and prompts.
    # Maximum prompt length, set by the engine. Tokenization stops early if a text certainly exceeds the
    # limit.
    max_prompt_tokens: int

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def max_image_pixels(self) -> int:
        """Return the default pixel limit for a resized image, or 0 if the model takes no images."""

    @property
    def media_cache(self) -> MediaCache[Any] | None:
        """Return the cache for prepared media, or None if there is no cache."""

    @property
    def template_variables(self) -> frozenset[str]:
        """Return the names of the variables that the chat template reads, without its loop variables."""

    def call_format(self, template_options: Mapping[str, Any] | None = None) -> CallFormat | None:
        """Return the format in which the chat template writes tool calls, or None if it supports no tools.

        `template_options`: as in `prepare`. They may select another template.
        """

    media_decoder: MediaDecoder | None
    """Decodes media that were sent encoded. If None, the thread that prepares a prompt also decodes its
    media. The attribute may be set at any time. A processor without this attribute, or without
    `decoder_recipe`, decodes all media itself."""

    @property
    def decoder_recipe(self) -> DecoderRecipe | None:
        """Return the recipe for a decoder process with the same results as this processor."""

    def prepare(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        base_folder: Path | None = None,
        media_options: dict[str, Any] | None = None,
        cache_salt: str = "",
        template_options: Mapping[str, Any] | None = None,
    ) -> Prepared:
        """Convert chat messages to a prompt. Messages have OpenAI's format. Parts of the types `image` and
        `video` are accepted too.

        `images` and `videos` supply the data, in order, for parts that contain no data. Relative paths are
        resolved under `base_folder`. `cache_salt`: two prompts share items in `media_cache` only if their
        salts are equal. `template_options`: further variables for the chat template (`tools`, `documents`,
        …). The option `chat_template` replaces the model's template. Raises InvalidRequest, InvalidMedia.
        """

    def prepare_text(
        self,
        text: str,
        *,
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        media_options: dict[str, Any] | None = None,
        cache_salt: str = "",
    ) -> Prepared:
        """Convert a prompt string with media placeholders, as a transformers processor does."""

    def count_images(self, text: str) -> int:
        """Return how many image placeholders are in a text for `prepare_text`."""

    def restore(self, item: MediaItem, source: MediaSource) -> MediaInput:
        """Decode a media item again from its source. Raises InvalidMedia if the pixels do not match the hash
        in `item`.
        """


@runtime_checkable
class TurnProcessor(Protocol):
    """Additional methods for sessions: the processor converts a conversation piece by piece."""

    @property
    def frames_in_patch(self) -> int:
        """Return how many video frames form a temporal patch; 1 if each frame is encoded as an image."""

    def around_film(
        self, template_options: Mapping[str, object] | None = None
    ) -> tuple[list[int], list[int]]:
        """Return the tokens that the chat template writes before and after a video."""

    def prepare_turn(
        self,
        content: Sequence[Mapping[str, object]],
        *,
        system: str,
        opens: Opens,
        closes: bool,
        in_film: bool = False,
        is_film: bool = False,
        base_folder: Path | None = None,
        media_options: Mapping[str, object] | None = None,
        cache_salt: str = "",
        template_options: Mapping[str, object] | None = None,
    ) -> Prepared:
        """Convert a piece of a user's turn: message parts, and the chat template's tokens around them.

        `opens`: "first" for the first turn after `system`, "next" for a turn after an answer, "" for a piece
        that continues a turn. `closes`: whether the answer follows this piece. `is_film`: whether all parts
        are frames from a single video. The video stays open: later pieces may add frames. `in_film`: whether
        the previous piece left a video open. With `is_film` this piece continues the open video, otherwise it
        first closes the video. Raises InvalidRequest, InvalidMedia.
        """


class AttentionPort(Protocol):
    """The decoder's access to the paged KV cache in a step over a ragged batch with t tokens.

    An optional method `cache_of(layer)` lets a kernel store unquantised k and v itself, instead of a call of
    `append`. It returns the layer's blocks [n, 2, block_size, num_kv_heads, head_dim] and the step's slots,
    int64 [t]. For an FP8 cache it returns None, and `append` must be called.
    """

    def append(self, layer: int, k: Any, v: Any) -> None:
        """Store k and v, each [t, num_kv_heads, head_dim], in the step's slots."""

    def run(self, layer: int, q: Any) -> Any:
        """Return the attention output for q [t, num_heads, head_dim], in the same shape. A token attends to
        itself and to earlier tokens in its row. `ModelSpec.attention` may restrict or extend the visible
        tokens.
        """


class SinkAttentionPort(AttentionPort, Protocol):
    """The AttentionPort for a model that has layers with attention sinks (`LayerAttention.has_sinks`)."""

    def run(self, layer: int, q: Any, sinks: Any = None) -> Any:
        """See AttentionPort. `sinks`: a score for each head, [num_heads], for a layer with sinks."""


@dataclass(frozen=True, slots=True)
class AuxHiddenStates:
    """The memory to which a forward pass writes the inputs of selected layers, for draft heads.

    A layer's input is the residual stream before the layer's input norm, in the model's dtype, with deepstack
    features. The layer number `num_layers` stands for the final norm.
    """

    layers: tuple[int, ...]  # Layer numbers from 0 to num_layers.
    rows: Any  # Tensor [t, len(layers) * hidden_size] with contiguous rows: a token's inputs side by side.


class EncoderSize(NamedTuple):
    """How much an encoder computes in one call.

    A segment is a run of patches that attend only to one another: an image, or a temporal patch in a video.
    """

    num_patches: int
    num_segments: int


class EncoderCost(NamedTuple):
    """An encoder's measured cost. `work_ns`: time per patch in ns, without attention. `even_patches`: the
    frame size, in patches, at which attention takes as long as all other operations (encoder_cache/work.py).
    """

    work_ns: int
    even_patches: int


class CapturableEncoder(Protocol):
    """An encoder whose inputs and outputs have fixed addresses, for any size up to a maximum.

    A step's items are computed in the smallest captured size that fits. Items do not attend to unused
    patches. All steps run in order on one stream, so a step cannot overwrite the inputs of an unfinished
    step.
    """

    patches: Any  # uint8 [p, patch_width] on the device. The caller writes a step's items to the beginning.

    def num_segments(self, grids: Sequence[tuple[int, int, int]]) -> int:
        """Return how many segments the items with these grids have."""

    def place(self, size: EncoderSize, num_patches: int, grids: Sequence[tuple[int, int, int]]) -> Any:
        """Write all inputs except `patches` for a step with these items, without waiting for the device.

        Returns the tensor in which `compute(size)` stores the items' features, in the format of `encode`. The
        features are valid until the next `compute`. `grids` may be empty. Raises ValueError as `encode` does.
        """

    def compute(self, size: EncoderSize) -> None:
        """Compute the features of a step that was placed with `size`. Because this call is captured, it must
        always launch the same kernels with the same addresses, and never wait for the device.
        """


class VisionLanguageModel(Protocol):
    """The networks on a device. Tensors are torch tensors. A step has t tokens and s rows that sample.

    Optional methods:

    * `capturable_encoder(largest: EncoderSize) -> CapturableEncoder | None`. Returns None if the encoder
    cannot be captured on this device. Without a capture, each call launches the encoder's kernels.
    * `measure_encoder() -> EncoderCost | None`, for an encoder that can pause within an item. The method runs
    a short measurement on the configured threads.
    * `encode_in_parts(patches, grid, even_patches)`, for an item with its patches on the device. Returns an
    object with a method `advance(until, work)`. A call computes the item up to about the fraction `until` /
    `work`. The last call (`until` equals `work`) returns the features, and other calls return None. If
    `measure_encoder` is missing or returns None, no item is encoded in parts.
    * `adapter(files: AdapterFiles)`, for a model with LoRA adapters. `encode` and `encode_in_parts` accept
    the result as the argument `adapter`. `forward` accepts `adapters`: each adapter in a step, with the
    indices of its tokens (models/lora/adapter.py, AdapterRows).
    """

    spec: ModelSpec
    # Whether a token's result has the same bits in any batch.
    batch_invariant: bool

    def encode(self, patches: Any, grids: Sequence[tuple[int, int, int]]) -> Any:
        """Encode the items' concatenated patches, uint8 [p, patch_width]. Returns features [number of
        embeddings, (1 + num_deepstack) * hidden_size].
        """

    def embed(self, input_ids: Any) -> Any:
        """Return the embeddings [t, hidden_size] for token ids, int64 [t]."""

    def forward(
        self,
        embeds: Any,
        deepstack: Any | None,
        positions: Any,
        attention: AttentionPort,
        aux_hidden_states: AuxHiddenStates | None = None,
        states: StepStates | None = None,
    ) -> Any:
        """Compute all decoder layers and return the normed hidden states [t, hidden].

        `embeds`: [t, hidden]. `deepstack`: [num_deepstack, t, hidden], zero at text tokens, or None.
        `positions`: int64 [3, t]. `aux_hidden_states`: its `rows` are filled, for draft heads. `states`: for
        models with `spec.state`. With None, all tokens form a single row that starts with an empty state, and
        the model keeps no state.
        """

    def logits(self, hidden: Any) -> Any:
        """Return the logits, float32 [s, vocab_size], for normed hidden states [s, hidden]."""


class ModelPlugin(Protocol):
    """A plugin for one or several related model architectures."""

    architectures: tuple[str, ...]

    def load_processor(self, folder: Path) -> Processor: ...

    def load_model(
        self,
        folder: Path,
        *,
        device: str,
        dtype: str,
        shard: Shard | None = None,
        batch_invariant: bool = False,
        quantize: Literal["none", "int8", "fp8"] = "none",
        activations: Literal["model", "int8"] = "model",
    ) -> VisionLanguageModel:
        """Load the networks.

        `shard`: load only this rank's share of the text decoder. `spec` then counts only this rank's heads.
        Only rank 0 has the vision tower and the LM head. A plugin without tensor parallelism may omit this
        parameter. `batch_invariant`: prefer batch-invariant kernels to faster kernels. `quantize`: the
        matrices' quantised format. `activations`: "int8" to quantise the input rows that are multiplied by
        integer codes. The engine passes only options that a user sets.
        """

    # A plugin may have a method `read_adapter(folder, adapter, max_bytes, value_bytes) -> AdapterFiles`. It
    # reads the LoRA adapter in the folder `adapter` for the model in `folder`. `max_bytes` limits the
    # adapter's matrices in memory, at `value_bytes` per value. The method raises ModelError for an adapter
    # that does not fit the model. A plugin without this method supports no adapters.

    # A plugin may have `box_units: Mapping[str, BoxUnit]` (box_unit.py), keyed by model_type.

    # A plugin may have a method `draft_head(folder) -> MtpHead | None` (mtp/files.py) for checkpoints with a
    # multi-token-prediction head. It reads no weights. It returns None if the folder has no head, and raises
    # ModelError for a damaged head.

    # A plugin may have a method `describe(folder) -> ModelSpec` for `mmengine model check`. It reads no
    # weights, and raises ModelError for a model that the plugin cannot serve.

    def fingerprint(self, folder: Path) -> str:
        """Return a hex digest for the weights in `folder`. The digest changes if the weights change."""

    def positions(self, prompt_token_ids: np.ndarray, media: Sequence[MediaItem]) -> tuple[np.ndarray, int]:
        """Return a prompt's rotary positions, int32 [3, n], and the delta for output tokens. The output token
        at index i in the sequence has the position i + delta in all three rows.
        """
