"""Messages and media to prompt tokens and patches, for Qwen3-VL. numpy, Pillow, PyAV, tokenizers."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmengine.checkpoint.files import read_json
from mmengine.checkpoint.fingerprint import fingerprint
from mmengine.errors import InvalidMedia, InvalidRequest, ModelError
from mmengine.models.decoding import DecoderRecipe, MediaDecoder
from mmengine.models.plugin import MediaInput, MediaSource, Prepared
from mmengine.request import CallFormat, MediaItem
from mmengine_qwen3_vl.arguments import as_images, as_videos, for_item, read_arguments
from mmengine_qwen3_vl.config import ModelConfig, read_config
from mmengine_qwen3_vl.decoder import check_length, recipe
from mmengine_qwen3_vl.media import MediaLoader
from mmengine_qwen3_vl.messages import MAX_TEXT_CHARS, MediaPart, fill, read_messages, read_variables
from mmengine_qwen3_vl.names import NAMES
from mmengine_qwen3_vl.settings import PatchSettings, Settings, read_settings
from mmengine_qwen3_vl.sources import Access
from mmengine_qwen3_vl.template import ChatTemplate
from mmengine_qwen3_vl.token_writer import TokenWriter
from mmengine_qwen3_vl.tokens import QwenTokenizer

VERSION = "qwen3-vl-processing-1"  # changes when the same input would give other pixels or tokens
GENERATION_NAMES = (
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "max_new_tokens",
    "max_length",
    "min_new_tokens",
)


def load_processor(folder: Path) -> "Qwen3VLProcessor":
    """The processor of the model in `folder`. Raises ModelError naming the file that is wrong."""
    folder = Path(folder)
    config = read_config(folder)
    tokenizer = QwenTokenizer(folder)
    return Qwen3VLProcessor(
        config=config,
        settings=read_settings(folder, config.vision),
        tokenizer=tokenizer,
        template=ChatTemplate.of_folder(folder, tokenizer),
        generation=_generation(folder),
        vision=fingerprint(folder, NAMES, prefix="visual."),
    )


class Qwen3VLProcessor:
    """Implements the Processor of mmengine.models.plugin. Holds nothing that changes but its cache."""

    def __init__(
        self,
        *,
        config: ModelConfig,
        settings: Settings,
        tokenizer: QwenTokenizer,
        template: ChatTemplate,
        generation: dict[str, Any],
        vision: str,
    ) -> None:
        self.tokenizer = tokenizer
        self.settings = settings
        self.max_positions = self.max_prompt_tokens = config.text.max_positions
        self._template = template
        self._last_given: ChatTemplate | None = None
        self._pads = {config.image_token_id: "image", config.video_token_id: "video"}
        self._start_id, self._end_id = (
            _special(tokenizer, f"<|vision_{side}|>") for side in ("start", "end")
        )
        if not self._pads.keys() <= tokenizer.special_ids:
            raise ModelError(
                "config.json's image_token_id or video_token_id is no special token of tokenizer.json"
            )
        names = {token: name for name, token in tokenizer.special.items()}
        self._image_pad = names[config.image_token_id]
        self.eos_token_ids = _eos_token_ids(generation, tokenizer)
        self.generation_defaults = {
            n: generation[n] for n in GENERATION_NAMES if generation.get(n) is not None
        }
        hash_key = f"{VERSION} {vision} {json.dumps(_describe(settings.patches))}".encode()
        self._loader = MediaLoader(settings, hash_key, self._check_length)
        self.media_cache = self._loader.cache
        parts = (VERSION, settings.describe(), tokenizer.digest, template.source, vision)
        self.fingerprint = hashlib.sha256("\0".join(parts).encode()).hexdigest()

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
        """See Processor. `continue_final_message` leaves the last message open and so wins over
        `add_generation_prompt`. `media_options` hold for every image and video that does not say
        otherwise; beside the names of a part it knows `local_files` (True; False refuses paths, as strangers'
        messages need) and `video_metadata` (a list, one entry for each of `videos`)."""
        options, access, metadata = read_arguments(media_options, base_folder)
        plain, parts = read_messages(messages)
        parts = fill(parts, as_images(images), as_videos(videos, metadata))
        template, variables = self._template_of(template_options)
        rendered = template.render(
            plain,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
            variables=variables,
        )
        pieces = template.split(rendered, self._limit + 1)
        ids, media = self._build(pieces, parts, options, access, cache_salt)
        return Prepared(ids, media, template.readable(rendered))

    @property
    def max_image_pixels(self) -> int:
        return self.settings.image.max_pixels

    @property
    def template_variables(self) -> frozenset[str]:
        return self._template.variables

    def call_format(self, template_options: Mapping[str, Any] | None = None) -> CallFormat | None:
        """See Processor."""
        return self._template_of(template_options)[0].call_format

    def _template_of(self, options: Mapping[str, Any] | None) -> tuple[ChatTemplate, dict[str, Any]]:
        """The template to render with, and its variables."""
        variables = dict(options or {})
        source = variables.pop("chat_template", None)
        if source is None:
            return self._template, read_variables(variables)
        if not isinstance(source, str):
            raise InvalidRequest(f"chat_template must be a Jinja template, not a {type(source).__name__}")
        last = self._last_given
        if last is None or last.source != source:  # a server gives the same one each time
            last = self._last_given = self._template.with_source(source)
        return last, read_variables(variables)

    def prepare_text(
        self,
        text: str,
        *,
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        media_options: dict[str, Any] | None = None,
        cache_salt: str = "",
    ) -> Prepared:
        """See Processor. Special tokens in `text` count: it is the developer's, not a user's."""
        if not isinstance(text, str):
            raise InvalidRequest(f"the prompt must be a string, not a {type(text).__name__}")
        if len(text) > MAX_TEXT_CHARS:
            raise InvalidRequest(f"the prompt has more than {MAX_TEXT_CHARS} characters; shorten it")
        options, access, metadata = read_arguments(media_options, None)
        parts = [MediaPart("image", item, {}, f"image {i}") for i, item in enumerate(as_images(images))]
        for i, item in enumerate(as_videos(videos, metadata)):
            parts.append(MediaPart("video", item, {}, f"video {i}"))
        pieces = self.tokenizer.split(text, self._limit + 1)
        ids, media_inputs = self._build(pieces, parts, options, access, cache_salt)
        return Prepared(ids, media_inputs, text)

    def _build(
        self,
        pieces: list[str | int],
        parts: list[MediaPart],
        options: Mapping[str, dict[str, Any]],
        access: Access,
        cache_salt: str,
    ) -> tuple[np.ndarray, tuple[MediaInput, ...]]:
        """Load the media and put their tokens where the placeholders stand in `pieces`: int32 [n], and what
        was loaded."""
        self._check_length(sum(isinstance(piece, int) for piece in pieces))
        self._check_counts(pieces, parts)
        waiting = {m: iter([p for p in parts if p.modality == m]) for m in self._pads.values()}
        numbers = {"image": 0, "video": 0}
        tokens = TokenWriter(self.tokenizer, self._limit, self._check_length)
        media = []
        for piece in pieces:
            if not isinstance(piece, int) or piece not in self._pads:
                tokens.add(piece)
                continue
            modality = self._pads[piece]
            part = next(waiting[modality])
            given = for_item({**options[modality], **part.options}, numbers[modality], part.where)
            numbers[modality] += 1
            loaded, source = self._loader.load(part, given, access, cache_salt)
            runs: tuple[tuple[int, int], ...]
            if modality == "image":
                runs = (tokens.repeat(piece, self._embeds(loaded.grid)),)
            else:
                runs = tuple(self._frame(tokens, piece, s, loaded.grid) for s in loaded.timestamps)
            item = MediaItem(loaded.mm_hash, modality, runs, loaded.grid)
            media.append(MediaInput(item, loaded.patches, source))
        return tokens.finish(), tuple(media)

    def count_images(self, text: str) -> int:
        return text.count(self._image_pad)

    def restore(self, item: MediaItem, source: MediaSource) -> MediaInput:
        media = self._loader.restore(item.modality, source)
        if media.mm_hash != item.mm_hash:
            raise InvalidMedia(
                f"the stored {item.modality} gives other pixels than before; was a library that decodes it "
                "changed?"
            )
        return MediaInput(item, media.patches, source)

    def _embeds(self, grid: tuple[int, int, int]) -> int:
        """Of one temporal patch."""
        return grid[1] * grid[2] // self.settings.patches.merge_size**2

    def _frame(self, tokens: "TokenWriter", pad: int, seconds: float, grid: tuple) -> tuple[int, int]:
        tokens.add(f"<{seconds:.1f} seconds>")
        tokens.add(self._start_id)
        run = tokens.repeat(pad, self._embeds(grid))
        tokens.add(self._end_id)
        return run

    @property
    def media_decoder(self) -> MediaDecoder | None:
        return self._loader.decoder

    @media_decoder.setter
    def media_decoder(self, decoder: MediaDecoder | None) -> None:
        self._loader.decoder = decoder

    @property
    def decoder_recipe(self) -> DecoderRecipe:
        return recipe(self.settings, self._limit, self._limiter)

    def _check_counts(self, pieces: list[str | int], parts: list[MediaPart]) -> None:
        for pad, modality in self._pads.items():
            places = pieces.count(pad)
            items = sum(part.modality == modality for part in parts)
            if places != items:
                raise InvalidRequest(
                    f"the prompt has {places} {modality} placeholders, but {items} {modality}s were given"
                )

    @property
    def _limit(self) -> int:
        return min(self.max_positions, self.max_prompt_tokens)

    @property
    def _limiter(self) -> str:
        return "the model" if self.max_positions <= self.max_prompt_tokens else "this engine"

    def _check_length(self, length: int) -> None:
        check_length(length, self._limit, self._limiter)


def _generation(folder: Path) -> dict[str, Any]:
    path = folder / "generation_config.json"
    return read_json(path) if path.is_file() else {}


def _eos_token_ids(generation: Mapping[str, Any], tokenizer: QwenTokenizer) -> tuple[int, ...]:
    found = generation.get("eos_token_id")
    ids = found if isinstance(found, list) else [found]
    if found is None:
        ids = [tokenizer.special[name] for name in ("<|im_end|>",) if name in tokenizer.special]
    if not ids or not all(type(token) is int and 0 <= token < tokenizer.vocab_size for token in ids):
        raise ModelError(
            f"generation_config.json: eos_token_id is {repr(found)[:60]}; it must name known token ids"
        )
    return tuple(ids)


def _special(tokenizer: QwenTokenizer, name: str) -> int:
    if name not in tokenizer.special:
        raise ModelError(f"tokenizer.json has no special token {name}, which a Qwen3-VL needs")
    return tokenizer.special[name]


def _describe(patches: PatchSettings) -> list[int]:
    return [patches.patch_size, patches.temporal_patch_size, patches.merge_size]
