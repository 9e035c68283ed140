"""Describes the prompts and media of SmolVLM2 to the shared processor."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from mmengine.checkpoint.files import read_json
from mmengine.checkpoint.fingerprint import fingerprint
from mmengine.errors import ModelError
from mmengine.processing.chat.template import ChatTemplate
from mmengine.processing.chat.token_writer import Piece, Run
from mmengine.processing.chat.tokens import ChatTokenizer
from mmengine.processing.description import Description, MediaDescription, read_generation, special_id
from mmengine.processing.media.loader import LoadedMedia
from mmengine.processing.media.patches import PatchSettings
from mmengine.processing.processor import ChatProcessor
from mmengine_smolvlm.config import ModelConfig, read_config
from mmengine_smolvlm.media import read_tiles
from mmengine_smolvlm.names import NAMES

_ONES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_TEENS = ("ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen")
_BELOW_TWENTY = (*_ONES, *_TEENS, "eighteen", "nineteen")
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def in_words(number: int) -> str:
    """Return an integer from 0 to 999,999 in words: "twenty-one", "one hundred and five", "two thousand,
    three hundred and ten".
    """
    if number < 20:
        return _BELOW_TWENTY[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return _TENS[tens - 2] + (f"-{_ONES[ones]}" if ones else "")
    size, unit = (1000, "thousand") if number >= 1000 else (100, "hundred")
    count, rest = divmod(number, size)
    head = f"{in_words(count)} {unit}"
    if not rest:
        return head
    return head + (", " if rest >= 100 else " and ") + in_words(rest)


VERSION = "smolvlm-processing-1"  # Changes when the same input would give other pixels or tokens.
IMAGE, VIDEO, END = "<image>", "<video>", "<end_of_utterance>"  # <video> is not a token in published folders.
# Published templates do not support videos. This template supports videos, and renders prompts without videos
# as the published templates do.
VIDEO_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message.role | capitalize }}"
    "{{ ':' if message.content[0].type == 'image' else ': ' }}{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% elif part.type == 'image' %}<image>"
    "{% elif part.type == 'video' %}<video>{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)


def load_processor(folder: Path) -> ChatProcessor:
    """Return the processor for the model in `folder`. Raises ModelError, which names the file at fault."""
    folder = Path(folder)
    config = read_config(folder)
    tokenizer = ChatTokenizer.of_folder(folder, (VIDEO,))
    media = _media(folder, config, tokenizer)
    template = ChatTemplate.of_folder(folder, tokenizer, media.modalities)
    of_videos = ChatTemplate.of_source(VIDEO_TEMPLATE, {}, tokenizer, "of videos", media.modalities)
    return ChatProcessor(
        Description(
            version=VERSION,
            tokenizer=tokenizer,
            template=template,
            max_positions=config.text.max_positions,
            generation=read_generation(folder),
            eos_token_ids=(tokenizer.special[END],) if END in tokenizer.special else (),
            media=media,
            templates={"video": of_videos},
        )
    )


def _media(folder: Path, config: ModelConfig, tokenizer: ChatTokenizer) -> MediaDescription:
    vision = config.vision
    patches = PatchSettings(vision.patch_size, vision.temporal_patch_size, vision.merge_size)
    settings = read_tiles(folder, patches, config.image_size)
    _check_length_of_runs(folder, settings.embeds)
    image, fake, whole = (
        special_id(tokenizer, name, "a SmolVLM")
        for name in (IMAGE, "<fake_token_around_image>", "<global-img>")
    )
    if image != config.image_token_id:
        raise ModelError(
            f"config.json's image_token_id is {config.image_token_id}, but {IMAGE} is token {image}"
        )
    run, video = Run(image, settings.embeds), tokenizer.marked[VIDEO]

    def tokens(pad: int, loaded: LoadedMedia) -> Iterator[Piece]:
        """Yield an item's tokens. For an image: each tile, preceded by its row and column, then the whole
        image. For a video: each frame, preceded by its timestamp.
        """
        picture = (fake, whole, run, fake)
        if pad == video:
            yield _intro(len(loaded.timestamps), loaded.duration)
            for seconds in loaded.timestamps:
                yield f"\nFrame from {int(seconds // 60):02d}:{int(seconds % 60):02d}:"
                yield from picture
            yield "\n\n"
            return
        rows, columns = loaded.tiles
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                place = f"<row_{row}_col_{column}>"
                yield from (fake, tokenizer.special.get(place, place), run)
            yield "\n"
        if rows:
            yield "\n"
        yield from picture

    pads = {image: "image", video: "video"}
    return MediaDescription(settings, pads, tokens, fingerprint(folder, NAMES, prefix="visual."))


def _intro(num_frames: int, seconds: float) -> str:
    return (
        f"You are provided the following series of {in_words(num_frames)} frames from a "
        f"{timedelta(seconds=int(seconds))} [H:MM:SS] video.\n"
    )


def _check_length_of_runs(folder: Path, embeds: int) -> None:
    path = folder / "processor_config.json"
    said = read_json(path).get("image_seq_len", embeds) if path.is_file() else embeds
    if said != embeds:
        raise ModelError(
            f"{path}: image_seq_len is {repr(said)[:60]}; the model makes {embeds} embeddings of a tile"
        )
