"""Defines the protocol of a model plugin: a processor (numpy only) and the networks (torch).

A plugin is an entry point in the group `mmengine.models`. Its module is cheap to import; only `load_model`
imports torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

from mmengine.models.media_cache import MediaCache
from mmengine.models.media_decoding import DecoderRecipe, MediaDecoder
from mmengine.models.sharding import Shard
from mmengine.models.states import StateSpec, StepStates
from mmengine.request import CallFormat, MediaItem


@dataclass(frozen=True, slots=True)
class MediaSource:
    """An image or a video as the client sent it: the encoded bytes or their file, and the requested options.
    An option is a number or a bool, by name.
    """

    data: bytes | Path
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class MediaInput:
    """A media item with its encoder input.

    `patches` is uint8 [num_patches, channels * temporal * patch²], with rows in the encoder's order: windows
    of merge x merge patches together. `source` lets `Processor.restore` make the same patches again; it is
    None if the client sent no encoded bytes.
    """

    item: MediaItem
    patches: np.ndarray
    source: MediaSource | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prompt that is ready to submit. `text` is the rendered prompt before placeholders expand."""

    prompt_token_ids: np.ndarray  # int32 [n]
    media: tuple[MediaInput, ...]
    text: str
    # For a piece of a session: number of first tokens that belong to the content before the piece.
    num_opening: int = 0


class Tokenizer(Protocol):
    """The tokenizer methods that serving needs."""

    vocab_size: int  # All ids below this number decode to something.
    special_ids: frozenset[int]

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self) -> list[bytes]:
        """Return each id's bytes in a text, for all ids below vocab_size; b"" for an id without text, and a
        special token's name.

        Grammars and logprobs use these bytes. Raises ModelError if a token has no bytes.
        """

    # A tokenizer may also have `text_bytes: Sequence[bytes] | None`: the bytes that each id adds to the text
    # of `decode`, if `decode` joins bytes and reads them as UTF-8 with U+FFFD for invalid bytes.
    # Detokenization is faster then.


Opens = Literal["first", "next", ""]  # How a piece of a user's turn opens a turn.


class Processor(Protocol):
    """Converts messages and media to prompt tokens and patches. Never imports torch. Thread-safe."""

    eos_token_ids: tuple[int, ...]
    generation_defaults: dict[str, Any]  # The sampling defaults of generation_config.json.
    fingerprint: str  # Hex digest; changes whenever pixels or prompts would change.
    # Set by the engine; a prompt that is certainly longer is refused before all its work is done.
    max_prompt_tokens: int

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def max_image_pixels(self) -> int:
        """Return the largest size in pixels that an image is resized to by default, or 0 if the model takes
        no images.
        """

    @property
    def media_cache(self) -> MediaCache[Any] | None:
        """Return the cache that holds prepared media by content, or None without a cache."""

    @property
    def template_variables(self) -> frozenset[str]:
        """Return the variable names that the chat template reads, without its loop variables."""

    def call_format(self, template_options: Mapping[str, Any] | None = None) -> CallFormat | None:
        """Return how the chat template writes tool calls, or None if the template supports no tools.

        `template_options` select the template, as in `prepare`.
        """

    media_decoder: MediaDecoder | None
    """Decodes media that were sent encoded. None: the thread that prepares them decodes. May be set at any
    time. A processor without this attribute, or without `decoder_recipe`, decodes all media itself."""

    @property
    def decoder_recipe(self) -> DecoderRecipe | None:
        """Return the recipe for a decoder process whose results equal this processor's own."""

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
        """Convert chat messages to a prompt. Messages have OpenAI's shape, or parts `image` and `video`.

        `images` and `videos` fill, in order, the placeholder parts without data. Relative paths are resolved
        under `base_folder`. A cached item in `media_cache` is found only with the same `cache_salt`.
        `template_options` are variables for the chat template beside the messages (`tools`, `documents`, …);
        as `chat_template` they replace the model's template. Raises InvalidRequest, InvalidMedia.
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
        """Convert a prompt string that already holds placeholders, as transformers' processor accepts it."""

    def count_images(self, text: str) -> int:
        """Return how many image placeholders a text for `prepare_text` has."""

    def restore(self, item: MediaItem, source: MediaSource) -> MediaInput:
        """Return an item's patches again. Raises InvalidMedia when the source now gives other pixels than
        `item` is the hash of.
        """


@runtime_checkable
class TurnProcessor(Protocol):
    """The Processor methods that write a conversation piece by piece, as sessions need."""

    @property
    def frames_in_patch(self) -> int:
        """Return how many frames of a video the encoder reads together; 1 if each frame is an image by
        itself.
        """

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
        """Convert a piece of a user's turn: parts as in a message, and the chat template's tokens around
        them.

        `opens` is "first" for the first turn after `system`, "next" for a turn after an answer, and "" if the
        piece continues a turn. `closes` means that the answer comes next. With `is_film` all parts are frames
        of a single video, whose end stays open. `in_film` means that a video is open: `is_film` continues it,
        otherwise it is closed. Raises InvalidRequest, InvalidMedia.
        """


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Model sizes that the runtime and the scheduler need."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_model_len: int
    num_deepstack: int  # A media token has (1 + num_deepstack) * hidden_size encoder features.
    patch_width: int  # Values in a patch row; 0 for a model without media, which is never asked to encode.
    merge_size: int = 2  # Patches along each side of an embedding.
    weights_held: str = ""  # For people: the quantised formats that matrices are held in, or "".
    state: StateSpec | None = None  # Layers with recurrent states instead of KV.

    @property
    def num_kv_layers(self) -> int:
        """Return how many layers have attention. An AttentionPort numbers these layers separately."""
        return self.num_layers - (self.state.num_layers if self.state is not None else 0)

    @property
    def has_encoder(self) -> bool:
        return self.patch_width > 0


class AttentionPort(Protocol):
    """A decoder layer's view of the paged cache, for t tokens in a ragged batch.

    A port whose blocks hold plain values may also have `cache_of(layer)`. That method returns the layer's
    blocks [n, 2, block_size, num_kv_heads, head_dim] and the step's slots, int64 [t], for a kernel that
    stores k and v itself; `append` is then not called for that layer.
    """

    def append(self, layer: int, k: Any, v: Any) -> None:
        """Store k and v, each [t, num_kv_heads, head_dim], in the step's slots."""

    def run(self, layer: int, q: Any) -> Any:
        """Return causal attention for q [t, num_heads, head_dim] over each row's own tokens, in the same
        shape.
        """


@dataclass(frozen=True, slots=True)
class AuxHiddenStates:
    """Where a forward pass writes chosen layers' inputs, for draft heads.

    An input is the residual stream as the layer's input norm reads it, in the model's dtype, including
    features added after the previous layer. Layer `num_layers` stands for the final norm's input.
    """

    layers: tuple[int, ...]  # Each from 0 to num_layers.
    rows: Any  # Tensor [t, len(layers) * hidden_size] with contiguous rows; the layers lie side by side.


class EncoderSize(NamedTuple):
    """How much an encoder computes at once.

    A segment is a run of patches that attend only to one another: an image, or a model's unit of a video.
    """

    num_patches: int
    num_segments: int


class EncoderCost(NamedTuple):
    """An encoder's measured cost. `work_ns`: time per patch without attention. `even_patches`: the frame size
    at which attention takes as long as the rest (encoder_cache/work.py).
    """

    work_ns: int
    even_patches: int


class CapturableEncoder(Protocol):
    """An encoder over fixed input and output memory, up to the size that it was made for.

    A step is written into the inputs and computed at a size that holds the step; items never see the unused
    rest. All steps run in order on a single stream: a step overwrites the inputs after the previous step was
    computed.
    """

    patches: Any  # uint8 [p, patch_width] on the device; the caller writes a step's items to its beginning.

    def num_segments(self, grids: Sequence[tuple[int, int, int]]) -> int:
        """Return how many segments these items have."""

    def place(self, size: EncoderSize, num_patches: int, grids: Sequence[tuple[int, int, int]]) -> Any:
        """Write the other inputs of a step with these items, without waiting for the device.

        Returns the tensor where their features (as from `encode`) lie after `compute(size)` has run, until
        the next run. Without items the whole size is unused. Raises ValueError as `encode` does.
        """

    def compute(self, size: EncoderSize) -> None:
        """Launch the same kernels over the same memory, whatever the memory holds, and never wait: this call
        is captured.
        """


class VisionLanguageModel(Protocol):
    """The networks on a device. Tensors are torch tensors; t tokens, s rows that sample.

    Optional methods:

    * `capturable_encoder(largest: EncoderSize) -> CapturableEncoder | None`. None means that this device
      cannot capture the encoder. Then, and without the method, each encoder call is launched anew.
    * `measure_encoder() -> EncoderCost | None`, for an encoder that can stop within an item. The method
      computes for a moment on the configured threads.
    * `encode_in_parts(patches, grid, even_patches)` for an item on the device. Returns an object whose
      `advance(until, work)` continues up to that share of the work, as near as the encoder can stop. The last
      call (`until` equals `work`) returns the features, the others None. Without `measure_encoder`, or when
      that returns None, no item is encoded in parts.
    * `adapter(files: AdapterFiles)`, for a model with LoRA adapters. `encode` and `encode_in_parts` accept
      the result as `adapter`. `forward` accepts `adapters`: each adapter of a step with its tokens' places
      (models/lora/adapter.py, AdapterRows).
    """

    spec: ModelSpec
    # Except in attention, a token's bits do not depend on the other tokens in the batch.
    batch_invariant: bool

    def encode(self, patches: Any, grids: Sequence[tuple[int, int, int]]) -> Any:
        """Encode uint8 [p, patch_width], the concatenated items, to features [number of embeddings, (1 +
        num_deepstack) * hidden_size].
        """

    def embed(self, input_ids: Any) -> Any:
        """Look up int64 [t] in the embedding: [t, hidden_size]."""

    def forward(
        self,
        embeds: Any,
        deepstack: Any | None,
        positions: Any,
        attention: AttentionPort,
        aux_hidden_states: AuxHiddenStates | None = None,
        states: StepStates | None = None,
    ) -> Any:
        """Run the decoder and return the normed hidden states [t, hidden].

        embeds is [t, hidden]. deepstack is [num_deepstack, t, hidden], zero at text tokens, or None.
        positions is int64 [3, t]. `aux_hidden_states` is filled; only draft heads ask for these. `states` is
        for models that have `spec.state`; without `states` all tokens belong to a single row from its first
        token, and no state is kept.
        """

    def logits(self, hidden: Any) -> Any:
        """Project [s, hidden] to float32 logits [s, vocab_size]."""


class ModelPlugin(Protocol):
    """A plugin for a family of architectures."""

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

        `shard`: this rank's part of the text decoder, whose heads `spec` then counts; only rank 0 has the
        vision tower and the head. A plugin that cannot split its model may leave the parameter out.
        `batch_invariant`: use batch-invariant kernels where there is a choice. `quantize`: the held matrices'
        format. `activations`: whether rows are rounded for these matrices. Each option is passed only when a
        user asks for it.
        """

    # A plugin may have `read_adapter(folder, adapter, max_bytes, value_bytes) -> AdapterFiles`: it reads the
    # LoRA adapter in the folder `adapter` for the model in `folder`. The adapter's matrices may take
    # `max_bytes` when held as values of `value_bytes`. Raises ModelError for an adapter that does not fit the
    # model. A plugin without the method takes no adapters.

    def fingerprint(self, folder: Path) -> str:
        """Return a hex digest that changes when the weights change."""

    def positions(self, prompt_token_ids: np.ndarray, media: Sequence[MediaItem]) -> tuple[np.ndarray, int]:
        """Return a prompt's rotary positions, int32 [3, n], and the delta: an output token at index i has
        position i + delta in all three rows.
        """
