"""What a model brings: a processor (numpy only) and the networks (torch).

A plugin is an entry point in the group `mmengine.models`. Its module is cheap to import; torch
is imported by `load_model` alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

from mmengine.models.decoding import DecoderRecipe, MediaDecoder
from mmengine.models.media_cache import MediaCache
from mmengine.models.sharding import Shard
from mmengine.models.states import StateSpec, StepStates
from mmengine.request import CallFormat, MediaItem


@dataclass(frozen=True, slots=True)
class MediaSource:
    """An image or a video as it was given: the encoded bytes (or the file that holds them), and the
    options that were asked for, plain numbers and truths by name."""

    data: bytes | Path
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class MediaInput:
    """A media item and what its encoder reads: uint8 [num_patches, channels * temporal * patch²],
    rows in the order of the encoder (windows of merge x merge patches together). `source`: what
    `Processor.restore` makes the same of again; None where there were no encoded bytes."""

    item: MediaItem
    patches: np.ndarray
    source: MediaSource | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prompt ready to submit. `text` is the rendered prompt, before placeholders grow."""

    prompt_token_ids: np.ndarray  # int32 [n]
    media: tuple[MediaInput, ...]
    text: str
    num_opening: int = 0  # of a piece of a session: its first tokens that belong to what stands before it


class Tokenizer(Protocol):
    """The little of a tokenizer that serving needs."""

    vocab_size: int  # ids below it decode to something
    special_ids: frozenset[int]

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self) -> list[bytes]:
        """The bytes that each id below vocab_size stands for in a text, b"" for none; of special tokens
        their names. Raises ModelError where a token has no bytes of its own. Grammars and logprobs ask."""

    # A tokenizer may have `text_bytes: Sequence[bytes] | None`: what each id adds to the text of `decode`,
    # where that joins bytes and reads them as UTF-8 with U+FFFD for what is none. Texts come faster then.


Opens = Literal["first", "next", ""]  # what a piece of a user's turn opens


class Processor(Protocol):
    """Messages and media to prompt tokens and patches. Never imports torch. Thread-safe."""

    eos_token_ids: tuple[int, ...]
    generation_defaults: dict[str, Any]  # what generation_config.json asks for
    fingerprint: str  # hex; changes when pixels or prompts would
    max_prompt_tokens: int  # the engine sets it; what is certainly longer is refused before all of it is work

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def max_image_pixels(self) -> int:
        """What an image is resized to at most, where nobody asks for another size; 0: it takes none."""

    @property
    def media_cache(self) -> MediaCache[Any] | None:
        """Of prepared media by content; None: it has none."""

    @property
    def template_variables(self) -> frozenset[str]:
        """What the chat template reads: its loop variables are not among them."""

    def call_format(self, template_options: Mapping[str, Any] | None = None) -> CallFormat | None:
        """How the chat template that `template_options` lead to has calls of tools written; None: it knows of
        no tools."""

    media_decoder: MediaDecoder | None
    """Who decodes media that were sent encoded; None: whoever prepares them, on its thread. May be set at
    any time. A processor that lacks it, or has no `decoder_recipe`, decodes all media itself."""

    @property
    def decoder_recipe(self) -> DecoderRecipe | None:
        """For a process whose decoder gives what this processor's own does."""

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
        """Chat messages, in OpenAI's shape or with parts `image` and `video`. `images` and `videos` fill, in
        order, placeholder parts that carry no data. Relative paths are read under `base_folder`. What
        `media_cache` holds is found by the same `cache_salt` only. `template_options`: variables of the chat
        template beside the messages (`tools`, `documents`, …), and as `chat_template` another one than the
        model's. Raises InvalidRequest, InvalidMedia."""

    def prepare_text(
        self,
        text: str,
        *,
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        media_options: dict[str, Any] | None = None,
        cache_salt: str = "",
    ) -> Prepared:
        """A prompt string that already holds placeholders, as transformers' processor takes it."""

    def count_images(self, text: str) -> int:
        """How many images a text for `prepare_text` has placeholders for."""

    def restore(self, item: MediaItem, source: MediaSource) -> MediaInput:
        """The patches of an item once more. Raises InvalidMedia when the source gives other pixels now
        than those that `item` is the hash of."""


@runtime_checkable
class TurnProcessor(Protocol):
    """Part of a Processor whose conversations can be written piece by piece, as sessions do."""

    @property
    def frames_in_patch(self) -> int:
        """Frames of a video that the encoder reads together; 1: each by itself, as an image."""

    def around_film(
        self, template_options: Mapping[str, object] | None = None
    ) -> tuple[list[int], list[int]]:
        """Tokens that the chat template writes before and behind a video."""

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
        """A piece of a user's turn: parts as those of a message, and what the chat template writes around
        them. `opens`: the turn, as the "first" one behind `system`, or the "next" one behind an answer; "":
        it goes on. `closes`: the answer comes next. `is_film`: all of it are frames of one video, whose end
        is left open; `in_film`: one was left open, which `is_film` goes on with and else is closed. Raises
        InvalidRequest, InvalidMedia."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes that the runtime and the scheduler need."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_model_len: int
    num_deepstack: int  # encoder features a media token: (1 + num_deepstack) * hidden_size
    patch_width: int  # values of one patch row; 0: the model takes no media, and is never asked to encode
    merge_size: int = 2  # patches that a side of one embedding stands for
    weights_held: str = ""  # for people: as which codes matrices are in memory, if they are
    state: StateSpec | None = None  # of layers that have recurrent states in place of KV

    @property
    def num_kv_layers(self) -> int:
        """Layers with attention, which a port counts by themselves."""
        return self.num_layers - (self.state.num_layers if self.state is not None else 0)

    @property
    def has_encoder(self) -> bool:
        return self.patch_width > 0


class AttentionPort(Protocol):
    """What a decoder layer sees of the paged cache; t tokens of a ragged batch.

    A port whose blocks hold plain values may also have `cache_of(layer)`: the layer's blocks
    [n, 2, block_size, num_kv_heads, head_dim] and the step's slots, int64 [t], for a kernel that stores k
    and v itself; `append` is then not called for that layer."""

    def append(self, layer: int, k: Any, v: Any) -> None:
        """Store k and v, each [t, num_kv_heads, head_dim], at the step's slots."""

    def run(self, layer: int, q: Any) -> Any:
        """Causal attention of q [t, num_heads, head_dim] over each row's own tokens; same shape."""


@dataclass(frozen=True, slots=True)
class AuxHiddenStates:
    """Where a forward leaves what enters chosen layers: the residual stream as the layer's input norm
    reads it, in the model's dtype, features added behind the layer before included. `num_layers` of the
    model stands for what enters the final norm."""

    layers: tuple[int, ...]  # each of 0 to num_layers
    rows: Any  # [t, len(layers) * hidden_size], contiguous rows; written, the layers side by side


class EncoderSize(NamedTuple):
    """How much an encoder computes at once. A segment is a run of patches that attend to one another and to
    no others: an image, or what a model makes of a stretch of a video."""

    num_patches: int
    num_segments: int


class EncoderCost(NamedTuple):
    """What was measured of an encoder: `work_ns`, what it takes for a patch beside attention, and
    `even_patches`, of a frame at which attention takes as long again (encoder_cache/work.py)."""

    work_ns: int
    even_patches: int


class CapturableEncoder(Protocol):
    """An encoder over inputs and outputs that stay where they are, up to the size that it was made for. A
    step is written into them and computed at a size that holds it; what is left of the size belongs to
    nobody, and no item sees it. All of it on one stream, one step after the other: a step's inputs are
    written over when the step before was computed."""

    patches: Any  # uint8 [p, patch_width] on the device; the caller writes a step's items to its beginning

    def num_segments(self, grids: Sequence[tuple[int, int, int]]) -> int:
        """Of these items."""

    def place(self, size: EncoderSize, num_patches: int, grids: Sequence[tuple[int, int, int]]) -> Any:
        """Write what else a step of these items needs, without waiting for the device. Gives where their
        features (as of `encode`) stand when `compute(size)` ran, until it runs again. Without items all of
        the size belongs to nobody. Raises ValueError as `encode` does."""

    def compute(self, size: EncoderSize) -> None:
        """Launch the same kernels over the same memory whatever lies in it, and never wait: this is
        captured."""


class VisionLanguageModel(Protocol):
    """The networks on one device. Tensors are torch tensors; t tokens, s rows that sample.

    A model may also have `capturable_encoder(largest: EncoderSize) -> CapturableEncoder | None`, None where
    what it has here cannot be captured: then, and without the method, each call of its encoder is launched
    anew. One whose encoder can stop within an item has `measure_encoder() -> EncoderCost | None`, which
    computes for a moment on the threads that are set, and `encode_in_parts(patches, grid, even_patches)` for
    one item on the device: an object whose `advance(until, work)` goes on up to that share of all of it, as
    near as it can stop, and gives the features with the last one (`until` is `work`), else None. Without the
    first, or where it gives None, no item is given it in parts.

    One that takes LoRA adapters has `adapter(files: AdapterFiles)`, which gives what `encode` and
    `encode_in_parts` take as `adapter`, and `forward` as `adapters`: for each adapter of a step that object
    with the places of its tokens (models/lora/adapter.py, AdapterRows)."""

    spec: ModelSpec
    batch_invariant: bool  # but for attention, a token's bits do not depend on who is computed with it

    def encode(self, patches: Any, grids: Sequence[tuple[int, int, int]]) -> Any:
        """uint8 [p, patch_width], items one after the other, to features
        [sum of embeds, (1 + num_deepstack) * hidden_size]."""

    def embed(self, input_ids: Any) -> Any:
        """int64 [t] to [t, hidden_size]."""

    def forward(
        self,
        embeds: Any,
        deepstack: Any | None,
        positions: Any,
        attention: AttentionPort,
        aux_hidden_states: AuxHiddenStates | None = None,
        states: StepStates | None = None,
    ) -> Any:
        """embeds [t, hidden]; deepstack [num_deepstack, t, hidden], zero at text tokens, or None;
        positions int64 [3, t]. Gives the normed hidden states [t, hidden]; fills `aux_hidden_states`.
        Only a draft head asks for these. `states`: only of a model that has `spec.state`; without them all
        tokens are one row's, from its first, and nothing is kept of it."""

    def logits(self, hidden: Any) -> Any:
        """[s, hidden] to float32 [s, vocab_size]."""


class ModelPlugin(Protocol):
    """One family of architectures."""

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
        """`shard`: of the text decoder this rank's part, whose heads `spec` then counts; the others have no
        vision tower and no head. A plugin that cannot cut its model need not take it. `batch_invariant`: the
        model should be, where there is a choice; `quantize`: as which codes it holds its matrices;
        `activations`: whether rows are rounded for them. They are only given where they are asked for."""

    # A plugin may have `read_adapter(folder, adapter, max_bytes, value_bytes) -> AdapterFiles`: the LoRA
    # adapter in the folder `adapter` for the model in `folder`, whose matrices take at most so many bytes
    # where they are held as values of `value_bytes`. Raises ModelError for one that is not for it. Without it
    # the model takes no adapters.

    def fingerprint(self, folder: Path) -> str:
        """Hex digest that changes when the weights do."""

    def positions(self, prompt_token_ids: np.ndarray, media: Sequence[MediaItem]) -> tuple[np.ndarray, int]:
        """Rotary positions of a prompt, int32 [3, n], and the delta: an output token at index i
        has position i + delta in all three rows."""
