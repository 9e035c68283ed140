"""Converts the various inputs that transformers' pipeline accepts to chats, or to texts with images."""

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeGuard, runtime_checkable

from mmengine.errors import FIELD, FieldPath, InvalidRequest
from mmengine.processing.media.data_urls import is_data_url

Message = dict[str, Any]
Chat = Sequence[Message]
_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
Shown = tuple[str | Chat, Sequence[object]]


def source_of(images: object, text: object) -> Iterable[object] | None:
    """Return the generator, iterator or dataset that contains the call's prompts, or None.

    As in transformers, a generator that yields messages is a single chat. For such a generator, returns a
    list with the messages.
    """
    given = images if text is None else text
    if isinstance(given, Iterator):
        first = next(given, None)
        if isinstance(first, dict) and "role" in first:
            return [first, *given]
        return itertools.chain(() if first is None else (first,), given)
    if isinstance(given, (str, bytes, list, tuple, Mapping)) or hasattr(given, "shape"):
        return None
    if isinstance(given, _Dataset):
        return _Items(given)
    return given if isinstance(given, Iterable) else None


@runtime_checkable
class _Dataset(Protocol):
    """A dataset from torch or any other library."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


class _Items:
    """Iterates over a dataset's items in order."""

    def __init__(self, dataset: _Dataset):
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[object]:
        return (self._dataset[index] for index in range(len(self._dataset)))


class Results:
    """An iterator over results in input order. Results are computed ahead of the reader.

    `len` returns the number of inputs, and raises TypeError for a generator's inputs.
    """

    def __init__(self, results: Iterator[object], source: Iterable[object]):
        self._results, self._source = results, source

    def __iter__(self) -> Iterator[object]:
        return self._results

    def __next__(self) -> object:
        return next(self._results)

    def __len__(self) -> int:
        if not isinstance(self._source, _Items):
            raise TypeError("the number of prompts in a generator is unknown")
        return len(self._source)


def group_inputs(
    images: object, text: object, count_images: Callable[[str], int]
) -> tuple[list[list[Shown]], bool]:
    """Return a call's prompts in groups, and whether the call returns a list of results for each group.

    If False, there is a single group. `count_images` counts the image placeholders in a text. Raises
    InvalidRequest.
    """
    if images is None and text is None:
        raise InvalidRequest("give text, or images with text")
    if text is None and _is_pair(images):
        return [[single_input(images)]], False
    if text is None and _is_sequence(images) and images and all(_is_pair(item) for item in images):
        return [[single_input(item)] for item in images], True
    if text is None and (_is_chat(images) or _are_chats(images) or _is_prompt(images)):
        images, text = None, images
    if text is None:
        raise InvalidRequest(f"{FIELD} need a text: pass text= too", path=FieldPath("images"))
    if images is not None and (_is_chat(text) or _are_chats(text)):
        raise InvalidRequest("images of a chat must be in its messages: pass either a chat or images")
    if _is_chat(text):
        return [[(text, ())]], False
    if _are_chats(text):
        return [[(chat, ())] for chat in text], True
    if isinstance(text, str):
        return [[(text, _flat(images))]], False
    if not _are_texts(text):
        raise InvalidRequest(
            f"{FIELD} must be a string, a list of strings, a chat, or a list of chats", path=FieldPath("text")
        )
    if images is None:
        return [[(one, ())] for one in text], True
    return [_match(images, text, count_images)], False


def single_input(given: object) -> Shown:
    """Return an item from a generator or dataset as a prompt.

    An item is a chat, a string, or a dict with `images` and `text`.
    """
    if _is_pair(given):
        return given["text"], _flat(given.get("images", given.get("image")))
    if isinstance(given, str) or _is_chat(given):
        return given, ()
    raise InvalidRequest(f"a prompt is a chat, a string or a dict with images and text, not {given!r:.80}")


def without_video_urls(chat: Chat) -> Chat:
    """Return the chat without its video_url parts, and warn if there are any.

    transformers' pipeline ignores video_url parts.
    """
    if not any(_is_video_url(part) for message in chat for part in _parts(message)):
        return chat
    warnings.warn(
        "video_url: as in transformers, message parts of this type are ignored; use "
        '{"type": "video", "url": …} or {"type": "video", "path": …}',
        stacklevel=5,
    )
    return [
        {**message, "content": [part for part in message["content"] if not _is_video_url(part)]}
        if _parts(message)
        else message
        for message in chat
    ]


def _parts(message: object) -> Sequence[object]:
    content = message.get("content") if isinstance(message, dict) else None
    return content if isinstance(content, (list, tuple)) else ()


def _is_video_url(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "video_url"


def _is_sequence(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, (list, tuple))


def _is_pair(value: object) -> TypeGuard[Message]:
    return isinstance(value, dict) and "role" not in value and isinstance(value.get("text"), str)


def _is_chat(value: object) -> TypeGuard[Chat]:
    return _is_sequence(value) and bool(value) and isinstance(value[0], dict)


def _are_chats(value: object) -> TypeGuard[Sequence[Chat]]:
    return _is_sequence(value) and bool(value) and isinstance(value[0], (list, tuple))


def _are_texts(value: object) -> TypeGuard[Sequence[str]]:
    return _is_sequence(value) and all(isinstance(one, str) for one in value)


def _is_prompt(value: object) -> bool:
    """Return whether `value` contains text prompts, not URLs or names of image files."""
    texts = value if _is_sequence(value) else [value]
    return bool(texts) and all(isinstance(text, str) and not _names_image(text) for text in texts)


def _names_image(text: str) -> bool:
    return (
        is_data_url(text)
        or text[:8].lower().startswith(("http://", "https://"))
        or text.lower().endswith(_SUFFIXES)
    )


def _flat(images: object) -> list[object]:
    if images is None:
        return []
    if not _is_sequence(images):
        return [images]
    return [one for image in images for one in (image if _is_sequence(image) else [image])]


def _match(images: object, texts: Sequence[str], count_images: Callable[[str], int]) -> list[Shown]:
    """Return each text with its images.

    If there are as many images as placeholders, the images fill the placeholders in order. The nesting of
    `images` is then ignored. Otherwise `images` must have an item or a list for each text.
    """
    counts, flat = [count_images(text) for text in texts], _flat(images)
    if flat and sum(counts) == len(flat):
        left = iter(flat)
        return [
            (text, list(itertools.islice(left, count))) for text, count in zip(texts, counts, strict=True)
        ]
    if not _is_sequence(images) or len(images) != len(texts):
        count = len(images) if _is_sequence(images) else 1
        raise InvalidRequest(f"{len(texts)} texts need as many images (or lists of images), not {count}")
    return [(text, _flat(image)) for text, image in zip(texts, images, strict=True)]
