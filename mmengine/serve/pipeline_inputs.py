"""The many forms in which transformers' pipeline takes prompts, as chats and texts with images."""

from collections.abc import Sequence
from typing import Any

from mmengine.errors import InvalidRequest

Chat = Sequence[dict[str, Any]]
Shown = tuple[str | Chat, Sequence[Any]]


def group_inputs(images: Any, text: Any) -> tuple[list[list[Shown]], bool]:
    """The prompts of a call, in groups that give one list of records each, and whether the call
    gives a list of such lists."""
    if images is None and text is None:
        raise InvalidRequest("give text, or images with text")
    if text is None and _is_pair(images):
        return [[single_input(images)]], False
    if text is None and _is_sequence(images) and images and all(_is_pair(item) for item in images):
        return [[single_input(item)] for item in images], True
    if text is None and _is_chat(images):
        images, text = None, images
    if text is None:
        raise InvalidRequest("images need a text that says what to do with them")
    if _is_chat(text):
        if images is not None:
            raise InvalidRequest("in a chat, images stand in the messages; give either a chat or images")
        if isinstance(text[0], dict):
            return [[(text, ())]], False
        return [[(chat, ())] for chat in text], True
    if isinstance(text, str):
        return [[(text, _flat(images))]], False
    if not _is_sequence(text) or not all(isinstance(one, str) for one in text):
        raise InvalidRequest("text must be a string, a list of strings, a chat, or a list of chats")
    if images is None:
        return [[(one, ())] for one in text], True
    return [_match(images, text)], False


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _is_pair(value: Any) -> bool:
    return isinstance(value, dict) and "role" not in value and isinstance(value.get("text"), str)


def _is_chat(value: Any) -> bool:
    return _is_sequence(value) and bool(value) and isinstance(value[0], (list, tuple, dict))


def single_input(given: Any) -> Shown:
    """One prompt of a generator: a chat, a string, or {"images", "text"}."""
    if _is_pair(given):
        return given["text"], _flat(given.get("images", given.get("image")))
    if isinstance(given, str) or (_is_chat(given) and isinstance(given[0], dict)):
        return given, ()
    raise InvalidRequest(f"a prompt is a chat, a string or a dict with images and text, not {given!r:.80}")


def _flat(images: Any) -> list[Any]:
    if images is None:
        return []
    if not _is_sequence(images):
        return [images]
    return [one for image in images for one in (image if _is_sequence(image) else [image])]


def _match(images: Any, texts: Sequence[str]) -> list[Shown]:
    """An image, or a list of them, for each text."""
    if not _is_sequence(images) or len(images) != len(texts):
        count = len(images) if _is_sequence(images) else 1
        raise InvalidRequest(f"{len(texts)} texts need as many images (or lists of images), not {count}")
    return [(text, _flat(image)) for text, image in zip(texts, images, strict=True)]
