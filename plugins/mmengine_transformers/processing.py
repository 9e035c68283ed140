"""Tells ChatProcessor how a hosted model, which runs transformers' modules, expects prompts and media."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from mmengine.checkpoint.fingerprint import fingerprint
from mmengine.checkpoint.model_files import read_model_json
from mmengine.checkpoint.names import TensorNames
from mmengine.errors import InvalidRequest
from mmengine.processing.chat.template import ChatTemplate
from mmengine.processing.chat.token_writer import Piece, Run
from mmengine.processing.chat.tokens import ChatTokenizer
from mmengine.processing.description import Description, MediaDescription, read_generation
from mmengine.processing.media.loader import LoadedMedia
from mmengine.processing.media.sources import MediaPart
from mmengine.processing.processor import ChatProcessor
from mmengine_transformers.media.packing import read_header
from mmengine_transformers.media.settings import HostedMedia

VERSION = "transformers-processing-1"  # Changes if an input results in other tokens or pixels than before.
DEFAULT_POSITIONS = 4096


class HostedProcessor(ChatProcessor):
    """A ChatProcessor with maximum numbers of images and videos in a prompt (HostedMedia's `max_images` and
    `max_videos`). For a model without videos, the error for a video includes the reason.
    """

    def _check_taken(self, *parts: Sequence[MediaPart]) -> None:
        settings = None if self.media is None else self.media.settings
        videos = [part for given in parts for part in given if part.modality == "video"]
        if videos and isinstance(settings, HostedMedia) and (reason := _no_video(settings)):
            text = f"{videos[0].where} is not supported: {reason}; send frames as images"
            raise InvalidRequest(text, path=videos[0].path)
        super()._check_taken(*parts)

    def _check_counts(self, pieces: list[str | int], parts: list[MediaPart]) -> None:
        super()._check_counts(pieces, parts)
        settings = None if self.media is None else self.media.settings
        images = sum(part.modality == "image" for part in parts)
        if isinstance(settings, HostedMedia) and 0 < settings.max_images < images:
            raise InvalidRequest(
                f"the prompt has {images} images; the limit of this model is {settings.max_images}, because "
                "its processor treats several images differently from one: send one image per request",
                path=("messages",),
            )
        videos = len(parts) - images
        if isinstance(settings, HostedMedia) and 0 < settings.max_videos < videos + bool(videos and images):
            raise InvalidRequest(
                f"the prompt has {videos} videos and {images} images; this model takes at most "
                f"{settings.max_videos} videos, and no images beside them: send frames as images",
                path=("messages",),
            )


def load_processor(folder: Path) -> ChatProcessor:
    """Return the processor for a folder's model. Raises ModelError."""
    folder = Path(folder)
    values = read_model_json(folder, "config.json")
    settings = _media_settings(folder, values)
    markers = () if settings is None else tuple(filter(None, (settings.image, settings.video)))
    tokenizer = ChatTokenizer.of_folder(folder, markers)
    media = None if settings is None else _description(folder, settings, tokenizer)
    modalities = () if media is None else media.modalities
    inner = values.get("text_config")
    text = inner if isinstance(inner, dict) else {}
    ends = values.get("eos_token_id", text.get("eos_token_id"))
    listed = ends if isinstance(ends, list) else [ends]
    return HostedProcessor(
        Description(
            version=VERSION,
            tokenizer=tokenizer,
            template=ChatTemplate.of_folder(folder, tokenizer, modalities, optional=True),
            max_positions=_positions(values) or _positions(text) or DEFAULT_POSITIONS,
            generation=read_generation(folder),
            eos_token_ids=tuple(each for each in listed if type(each) is int),
            media=media,
            templates={} if media is None else _templates(settings, media, tokenizer),
        )
    )


def _templates(
    settings: HostedMedia | None, media: MediaDescription, tokenizer: ChatTokenizer
) -> dict[str, ChatTemplate]:
    """Return modality -> template, for modalities with a separate template."""
    source = "" if settings is None else settings.video_template
    if not source:
        return {}
    return {"video": ChatTemplate.of_source(source, {}, tokenizer, "of videos", media.modalities)}


def _no_video(settings: HostedMedia) -> str:
    """Return the reason why the model accepts no videos, or ""."""
    if settings.no_video:
        return settings.no_video
    from mmengine_transformers.media.processors import video_refusal  # Imports transformers.

    return video_refusal(Path(settings.folder))


def _positions(values: dict[str, object]) -> int:
    found = values.get("max_position_embeddings")
    return found if type(found) is int and found > 0 else 0


def _media_settings(folder: Path, values: dict[str, object]) -> HostedMedia | None:
    """Return the media settings. For a text model, return None without importing transformers."""
    if not isinstance(values.get("vision_config"), dict):
        return None
    # These modules import transformers, which is slow.
    from mmengine_transformers.classes import read_model
    from mmengine_transformers.media.opening import open_media

    return open_media(folder, read_model(folder)[0])


def _description(folder: Path, settings: HostedMedia, tokenizer: ChatTokenizer) -> MediaDescription:
    ids = [tokenizer.special[token] for token in (*settings.embeds, *settings.indicators)]
    placed = frozenset(ids)

    def tokens(_: int, loaded: LoadedMedia) -> Iterator[Piece]:
        """Yield an item's tokens as transformers' processor writes them. Consecutive equal placeholders form
        a run.
        """
        for piece, equal in groupby(tokenizer.split(read_header(loaded.patches).text)):
            if piece in placed and isinstance(piece, int):
                yield Run(piece, sum(1 for _ in equal))
            else:
                yield from equal

    pads = {
        tokenizer.marked[text]: kind
        for text, kind in ((settings.image, "image"), (settings.video, "video"))
        if text
    }
    encoder = f"{fingerprint(folder, TensorNames(()))} {settings.identity}"
    return MediaDescription(settings, pads, tokens, encoder)
