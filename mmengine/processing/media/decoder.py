"""Builds a worker process's decoder, which converts encoded images and videos to patches. Also checks prompt
lengths. This module imports neither torch nor a tokenizer.
"""

import importlib
from functools import partial

import msgspec

from mmengine.errors import ErrorCode, InvalidRequest
from mmengine.models.media_decoding import DecodedMedia, DecoderRecipe, EncodedMedia, MediaDecoder
from mmengine.processing.media.loader import MediaLoader
from mmengine.processing.media.settings import MediaSettings
from mmengine.processing.media.sources import Access, MediaPart


class _Recipe(msgspec.Struct, frozen=True):
    """The parameters of a decoder. `module`, `name`: module and name of the settings' class. `limit`, `who`:
    see `recipe`.
    """

    module: str
    name: str
    settings: msgspec.Raw
    limit: int
    who: str


def recipe(settings: MediaSettings, limit: int, who: str) -> DecoderRecipe:
    """Return the recipe from which `decoder` builds a MediaDecoder in the worker process.

    `limit`: maximum prompt length in tokens. `who`: what sets this limit, for errors.
    """
    kind, data = type(settings), msgspec.Raw(msgspec.json.encode(settings))
    made = _Recipe(kind.__module__, kind.__name__, data, limit, who)
    return DecoderRecipe(__name__, msgspec.json.encode(made))


def decoder(settings: bytes) -> MediaDecoder:
    """Return the decoder that a recipe describes."""
    read = msgspec.json.decode(settings, type=_Recipe)
    kind: type[MediaSettings] = getattr(importlib.import_module(read.module), read.name)
    check = partial(check_length, most=read.limit, who=read.who)
    return partial(_decode, MediaLoader(msgspec.json.decode(read.settings, type=kind), b"", check))


def _decode(loader: MediaLoader, media: EncodedMedia) -> DecodedMedia:
    data = list(media.data) if isinstance(media.data, tuple) else media.data
    times = media.times
    source: object = data
    if times is not None:
        metadata = {"fps": times.fps, "frames_indices": times.indices, "total_num_frames": times.total}
        source = data, metadata
    return loader.decode(MediaPart(media.modality, source, {}, media.where), media.options, Access())


def check_length(length: int, most: int, who: str = "the model", *, media: bool = True) -> None:
    """Raise InvalidRequest for a prompt with more tokens than `most`.

    `who`: what sets the limit, for the error. `media`: whether the prompt may contain media. Agents look for
    "prompt is too long" at the error's beginning, and then shorten their conversation.
    """
    if length > most:
        advice = "shorten it, or send fewer or smaller images" if media else "shorten it"
        raise InvalidRequest(
            f"prompt is too long: {length} tokens > {most} maximum of {who}: {advice}",
            code=ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            path=("prompt",),
        )
