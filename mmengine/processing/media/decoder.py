"""What a decoder process runs: encoded images and videos to patches. Neither torch nor a tokenizer."""

from functools import partial

import msgspec

from mmengine.errors import InvalidRequest
from mmengine.models.decoding import DecodedMedia, DecoderRecipe, EncodedMedia, MediaDecoder
from mmengine.processing.media.loader import MediaLoader
from mmengine.processing.media.settings import Settings
from mmengine.processing.media.sources import Access, MediaPart


class _Recipe(msgspec.Struct, frozen=True):
    settings: Settings
    limit: int
    who: str


def recipe(settings: Settings, limit: int, who: str) -> DecoderRecipe:
    """For `decoder`, below. `limit`, `who`: of tokens, and whose it is."""
    return DecoderRecipe(__name__, msgspec.json.encode(_Recipe(settings, limit, who)))


def decoder(settings: bytes) -> MediaDecoder:
    """The decoder that `recipe` describes."""
    read = msgspec.json.decode(settings, type=_Recipe)
    check = partial(check_length, most=read.limit, who=read.who)
    return partial(_decode, MediaLoader(read.settings, b"", check))


def _decode(loader: MediaLoader, media: EncodedMedia) -> DecodedMedia:
    data = list(media.data) if isinstance(media.data, tuple) else media.data
    times = media.times
    source = data if times is None else (data, {"fps": times.fps, "frames_indices": times.indices})
    return loader.decode(MediaPart(media.modality, source, {}, media.where), media.options, Access())


def check_length(length: int, most: int, who: str = "the model", *, media: bool = True) -> None:
    """Raises InvalidRequest for a prompt of more than the `most` tokens that `who` takes. `media`: it may
    hold some."""
    if length > most:
        advice = "shorten it, or send fewer or smaller images" if media else "shorten it"
        raise InvalidRequest(f"the prompt has {length} tokens or more, {who} takes at most {most}; {advice}")
