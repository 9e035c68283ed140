"""Make benchmark requests about synthetic pictures and videos."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmengine.models.plugin import Prepared, Processor
from mmengine_shapes.questions import clip_questions, image_questions, pair_questions
from mmengine_shapes.scenes import Scene, random_clip, random_scene

TEXTS = (
    "What is 3 plus 4?",
    "Hello!",
    "Which is larger, 7 or 12?",
    "What is 9 minus 5?",
    "Who are you?",
)
# Sides in pixels; 9 to 64 visual tokens. The processor enlarges 64 pixels to 96.
SIDES = (64, 96, 96, 128, 160, 192, 256)
GROUP = 16  # Every 16 requests have the same mix.


@dataclass(frozen=True, slots=True)
class Ask:
    """A benchmark request: a prepared prompt, and the number of tokens to generate."""

    prepared: Prepared
    num_new: int
    kind: str


def mixed(processor: Processor, count: int, longest: int, seed: int = 5) -> list[Ask]:
    """Return `count` requests in random order. Each generates 16 to `longest` tokens, or exactly `longest`
    tokens if `longest` is less than 16.

    Of every 16 requests, 4 have only text, 9 have an image, 1 has two images, 1 has three images, and 1 has a
    video. Half of the images come from four shared pictures.
    """
    rng = random.Random(seed)
    shared = [random_scene(rng, side=side) for side in (96, 128, 192, 256)]
    asks = []
    for _ in range(-(-count // GROUP)):
        asks += [_ask(processor, rng, longest, "text", rng.choice(TEXTS)) for _ in range(4)]
        pictures = [rng.choice(shared) for _ in range(5)]
        pictures += [random_scene(rng, side=rng.choice(SIDES)) for _ in range(4)]
        for scene in pictures:
            question = _one(rng, image_questions(scene, rng))
            asks.append(_ask(processor, rng, longest, "one image", question, scenes=[scene]))
        for number, kind in ((2, "two images"), (3, "three images")):
            scenes = [rng.choice(shared)]
            scenes += [random_scene(rng, side=rng.choice(SIDES)) for _ in range(number - 1)]
            question = _one(rng, pair_questions(*scenes[:2], rng))
            asks.append(_ask(processor, rng, longest, kind, question, scenes=scenes))
        clip = random_clip(rng)
        question = _one(rng, clip_questions(clip, rng))
        frames = [np.asarray(frame) for frame in clip.frames()]
        asks.append(_ask(processor, rng, longest, "video", question, videos=[frames]))
    rng.shuffle(asks)
    return asks[:count]


def one_image(processor: Processor, count: int, longest: int, seed: int = 6) -> list[Ask]:
    """Return `count` questions about the same picture of 256 x 256 pixels (64 visual tokens)."""
    rng = random.Random(seed)
    scene = random_scene(rng, side=256, count=4)
    questions = [_one(rng, image_questions(scene, rng)) for _ in range(count)]
    return [_ask(processor, rng, longest, "one image", question, scenes=[scene]) for question in questions]


def long_answers(processor: Processor, count: int, num_new: int, seed: int = 7) -> list[Ask]:
    """Return `count` questions about different pictures, each with `num_new` new tokens."""
    rng = random.Random(seed)
    asks = []
    for _ in range(count):
        scene = random_scene(rng, side=128)
        question = _one(rng, image_questions(scene, rng))
        asks.append(_ask(processor, rng, num_new, "one image", question, scenes=[scene], shortest=num_new))
    return asks


def random_texts(count: int, length: int, num_new: int, vocab: int, seed: int = 8) -> list[Ask]:
    """Return `count` prompts with `length` random tokens below `vocab`, for a model with random weights."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, vocab, length).astype(np.int32) for _ in range(count)]
    return [Ask(Prepared(ids, (), ""), num_new, "text") for ids in prompts]


def count_shared(asks: Sequence[Ask]) -> tuple[int, int]:
    """Return two counts: images that occur in several requests, and all images. A repeated image counts each
    time.
    """
    shown: Counter[bytes] = Counter()
    for ask in asks:
        shown.update({media.item.mm_hash for media in ask.prepared.media})
    places = [each.item for ask in asks for each in ask.prepared.media if each.item.modality == "image"]
    return sum(shown[item.mm_hash] > 1 for item in places), len(places)


def _one(rng: random.Random, by_task: dict[str, list[tuple[str, str]]]) -> str:
    return rng.choice([question for pairs in by_task.values() for question, _ in pairs])


def _ask(
    processor: Processor,
    rng: random.Random,
    longest: int,
    kind: str,
    question: str,
    *,
    scenes: Sequence[Scene] = (),
    videos: Sequence[Any] = (),
    shortest: int = 16,
) -> Ask:
    parts = [{"type": "image"}] * len(scenes) + [{"type": "video"}] * len(videos)
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]
    prepared = processor.prepare(messages, images=[scene.draw() for scene in scenes], videos=videos)
    return Ask(prepared, rng.randint(min(shortest, longest), longest), kind)
