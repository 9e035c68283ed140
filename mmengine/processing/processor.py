"""Converts messages and media to prompt tokens and patches, as a model plugin's description requires. Does
not import torch.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np

from mmengine.errors import FIELD, FieldPath, InvalidMedia, InvalidRequest, MMEngineError, ModelError
from mmengine.models.media_cache import MediaCache
from mmengine.models.media_decoding import DecoderRecipe, MediaDecoder
from mmengine.models.plugin import MediaInput, MediaSource, Opens, Prepared
from mmengine.processing.chat.messages import MAX_TEXT_CHARS, fill, read_messages, read_variables
from mmengine.processing.chat.session_turn import around_video, in_one_film, render_turn
from mmengine.processing.chat.template import ChatTemplate
from mmengine.processing.chat.token_writer import TokenWriter
from mmengine.processing.description import Description, MediaDescription
from mmengine.processing.media.arguments import as_images, as_videos, for_item, read_arguments
from mmengine.processing.media.decoder import check_length, recipe
from mmengine.processing.media.loader import LoadedMedia, MediaLoader
from mmengine.processing.media.sources import Access, MediaPart
from mmengine.request import CallFormat, MediaItem, check_unicode

PROMPT = FieldPath("prompt")
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


class ChatProcessor:
    """Implements mmengine.models.plugin.Processor. Only caches are mutable. Raises ModelError if the
    description contradicts its tokenizer.
    """

    def __init__(self, described: Description) -> None:
        tokenizer, media = described.tokenizer, described.media
        self.tokenizer, self.media = tokenizer, media
        self.max_positions = self.max_prompt_tokens = described.max_positions
        self._template, self._templates = described.template, described.templates
        self._last_given: ChatTemplate | None = None
        self._pads = media.placeholders if media is not None else {}
        self._remedy = described.remedy
        self._names = {token: name for name, token in tokenizer.marked.items()}
        if not self._pads.keys() <= self._names.keys():
            fields = " or ".join(f"{modality}_token_id" for modality in self._pads.values())
            raise ModelError(f"config.json's {fields} is not a special token in tokenizer.json")
        self.eos_token_ids = _eos_token_ids(described)
        said = described.generation
        self.generation_defaults = {n: said[n] for n in GENERATION_NAMES if said.get(n) is not None}
        self._loader: MediaLoader | None = None
        self.media_cache: MediaCache[LoadedMedia] | None = None
        if media is not None:
            self._loader = MediaLoader(media.settings, _hash_key(described, media), self._check_length)
            self.media_cache = self._loader.cache
        seen = ("", "") if media is None else (media.settings.describe(), media.encoder)
        sources = (template.source for template in (self._template, *self._templates.values()))
        parts = (described.version, seen[0], tokenizer.digest, *sources, seen[1])
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
        """Prepare chat messages; see Processor.

        `continue_final_message` ends the prompt with the last message's text, without the template's
        end-of-turn text. The answer then continues the message, and `add_generation_prompt` is ignored.
        `media_options` apply to every image and video, except where a message part has its own options.
        `media_options` may also contain `local_files` (False refuses paths in untrusted messages; default
        True) and `video_metadata` (a list with an entry per video).
        """
        options, access, metadata = read_arguments(media_options, base_folder)
        plain, parts = read_messages(messages)
        beside = _beside(images, videos, metadata)
        self._check_taken(parts, beside)
        parts = fill(parts, beside)
        template, variables = self._template_of(template_options, {part.modality for part in parts})
        rendered = template.render(
            plain,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
            variables=variables,
        )
        pieces = template.split(rendered, self._limit + 1)
        ids, media = self._build(pieces, parts, options, access, cache_salt)
        return Prepared(ids, media, template.readable(rendered))

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
        """See TurnProcessor."""
        options, access, _ = read_arguments(media_options, base_folder)
        (plain, *_), parts = read_messages([{"role": "user", "content": list(content)}])
        check_unicode(("system",), system)
        self._check_taken(parts)
        template, variables = self._template_of(template_options, {part.modality for part in parts})
        turn = render_turn(
            template, plain["content"], system=system, opens=opens, closes=closes, variables=variables
        )
        pieces, num_opening = template.split(turn.text, self._limit + 1), 0
        if in_film or is_film:
            before, after = around_video(template, self._pads, variables)
            pieces = in_one_film(pieces, before, after, in_film=in_film, is_film=is_film)
            num_opening = 0 if is_film else len(self._plain_ids(after))
        ids, media = self._build(pieces, parts, options, access, cache_salt)
        if turn.opening:
            own = self._plain_ids(template.split(turn.opening))
            alike = own[: len(ids)] == ids[: len(own)]
            num_opening = len(alike) if alike.all() else int(alike.argmin())
        return Prepared(ids, media, template.readable(turn.text), num_opening)

    def around_film(
        self, template_options: Mapping[str, object] | None = None
    ) -> tuple[list[int], list[int]]:
        """See TurnProcessor."""
        template, variables = self._template_of(template_options, {"video"})
        before, after = around_video(template, self._pads, variables)
        return self._plain_ids(before).tolist(), self._plain_ids(after).tolist()

    def _plain_ids(self, pieces: Sequence[str | int]) -> np.ndarray:
        """Return the token ids, int32 [n], for a prompt without media."""
        tokens = TokenWriter(self.tokenizer, self._limit, self._check_length)
        for piece in pieces:
            tokens.add(piece)
        return tokens.finish() if pieces else np.zeros(0, np.int32)

    @property
    def frames_in_patch(self) -> int:
        """See TurnProcessor."""
        if self.media is None or "video" not in self._pads.values():
            return 1
        return self.media.settings.patches.temporal_patch_size

    @property
    def max_image_pixels(self) -> int:
        return 0 if self.media is None else self.media.settings.max_image_pixels

    @property
    def template_variables(self) -> frozenset[str]:
        return self._template.variables

    def call_format(self, template_options: Mapping[str, Any] | None = None) -> CallFormat | None:
        """See Processor."""
        return self._template_of(template_options)[0].call_format

    def _template_of(
        self, options: Mapping[str, Any] | None, modalities: Collection[str] = ()
    ) -> tuple[ChatTemplate, dict[str, Any]]:
        """Return the template for messages with these modalities, and the template's variables."""
        variables = dict(options or {})
        source = variables.pop("chat_template", None)
        if source is None:
            own = (self._templates[each] for each in modalities if each in self._templates)
            return next(own, self._template), read_variables(variables)
        if not isinstance(source, str):
            text = f"{FIELD} must be a Jinja template, not a {type(source).__name__}"
            raise InvalidRequest(text, path=FieldPath("chat_template"))
        last = self._last_given
        if last is None or last.source != source:  # A server passes the same template in each call.
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
        """Prepare a prompt string; see Processor.

        Special tokens in `text` are recognized, because the caller is trusted. The tokenizer's prefix, such
        as BOS, precedes the text.
        """
        if not isinstance(text, str):
            raise InvalidRequest(f"the prompt must be a string, not a {type(text).__name__}", path=PROMPT)
        if len(text) > MAX_TEXT_CHARS:
            raise InvalidRequest(
                f"the prompt has more than {MAX_TEXT_CHARS} characters; shorten it", path=PROMPT
            )
        options, access, metadata = read_arguments(media_options, None)
        parts = _beside(images, videos, metadata)
        self._check_taken(parts)
        pieces = [*self.tokenizer.text_prefix, *self.tokenizer.split(text, self._limit + 1)]
        ids, media = self._build(pieces, parts, options, access, cache_salt)
        return Prepared(ids, media, text)

    def _build(
        self,
        pieces: list[str | int],
        parts: list[MediaPart],
        options: Mapping[str, dict[str, Any]],
        access: Access,
        cache_salt: str,
    ) -> tuple[np.ndarray, tuple[MediaInput, ...]]:
        """Load the media, and replace the placeholders in `pieces` by tokens for the media. Return the token
        ids, int32 [n], and the media.
        """
        self._check_length(sum(isinstance(piece, int) for piece in pieces))
        self._check_counts(pieces, parts)
        waiting = {m: iter([p for p in parts if p.modality == m]) for m in self._pads.values()}
        numbers: Counter[str] = Counter()
        tokens = TokenWriter(self.tokenizer, self._limit, self._check_length)
        media = []
        for piece in pieces:
            if not isinstance(piece, int) or piece not in self._pads:
                tokens.add(piece)
                continue
            described, loader = self._of_media
            part = next(waiting[self._pads[piece]])
            given, number = {**options[part.modality], **part.options}, numbers[part.modality]
            numbers[part.modality] += 1
            try:
                loaded, source = loader.load(part, for_item(given, number, part.where), access, cache_salt)
            except MMEngineError as error:
                raise error.located(part.path) from error.__cause__
            runs = tokens.write(described.tokens(piece, loaded))
            item = MediaItem(loaded.mm_hash, part.modality, runs, loaded.grid, loaded.interval)
            media.append(MediaInput(item, loaded.patches, source))
        return tokens.finish(), tuple(media)

    def count_images(self, text: str) -> int:
        return sum(text.count(self._names[token]) for token, kind in self._pads.items() if kind == "image")

    def restore(self, item: MediaItem, source: MediaSource) -> MediaInput:
        media = self._of_media[1].restore(item.modality, source)
        if media.mm_hash != item.mm_hash:
            raise InvalidMedia(
                f"the stored {item.modality} gives other pixels than before; "
                "a decoding library may have changed"
            )
        return MediaInput(item, media.patches, source)

    @property
    def _of_media(self) -> tuple[MediaDescription, MediaLoader]:
        """Return the media description and the media loader. Raises InvalidMedia for a text-only model."""
        if self.media is None or self._loader is None:
            raise InvalidMedia("this model accepts only text, no images or videos")
        return self.media, self._loader

    @property
    def media_decoder(self) -> MediaDecoder | None:
        return None if self._loader is None else self._loader.decoder

    @media_decoder.setter
    def media_decoder(self, decoder: MediaDecoder | None) -> None:
        if self._loader is not None:
            self._loader.decoder = decoder

    @property
    def decoder_recipe(self) -> DecoderRecipe | None:
        return None if self.media is None else recipe(self.media.settings, self._limit, self._limiter)

    def _check_taken(self, *parts: Sequence[MediaPart]) -> None:
        for part in (each for given in parts for each in given):
            if part.modality not in self._pads.values():
                kinds = " and ".join(["text", *(f"{modality}s" for modality in self._pads.values())])
                raise InvalidRequest(
                    f"{part.where} is not supported: this model accepts {kinds}, no {part.modality}s; leave "
                    f"it out, or {self._remedy}",
                    path=part.path,
                )

    def _check_counts(self, pieces: list[str | int], parts: list[MediaPart]) -> None:
        for pad, modality in self._pads.items():
            places = pieces.count(pad)
            items = sum(part.modality == modality for part in parts)
            if places != items:
                raise InvalidRequest(
                    f"the prompt has {places} {modality} placeholders, but {items} {modality}s were given",
                    path=PROMPT,
                )

    @property
    def _limit(self) -> int:
        return min(self.max_positions, self.max_prompt_tokens)

    @property
    def _limiter(self) -> str:
        return "the model" if self.max_positions <= self.max_prompt_tokens else "this engine"

    def _check_length(self, length: int) -> None:
        check_length(length, self._limit, self._limiter, media=self.media is not None)


def _beside(images: object, videos: object, metadata: object) -> list[MediaPart]:
    """Return the media that the caller passed outside the messages."""
    given = {"image": as_images(images), "video": as_videos(videos, metadata)}
    return [
        MediaPart(m, item, {}, f"{m} {i}", FieldPath(f"{m}s", i))
        for m, items in given.items()
        for i, item in enumerate(items)
    ]


def _hash_key(described: Description, media: MediaDescription) -> bytes:
    """Return a key for media hashes. The key differs for each encoder and for each setting of the patches."""
    patches = json.dumps(astuple(media.settings.patches))
    return f"{described.version} {media.encoder} {patches}".encode()


def _eos_token_ids(described: Description) -> tuple[int, ...]:
    found = described.generation.get("eos_token_id")
    ids = found if isinstance(found, list) else [found]
    if found is None:
        ids = list(described.eos_token_ids)
    if not ids or not all(
        type(token) is int and 0 <= token < described.tokenizer.vocab_size for token in ids
    ):
        raise ModelError(
            f"generation_config.json: eos_token_id is {repr(found)[:60]}; it must name known token ids"
        )
    return tuple(ids)
