"""Generates random requests of every kind for the scheduler's stress test."""

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from mmengine.request import MediaItem, Request, SamplingParams

NUM_PREFIXES = 40
NUM_PICTURES = 60
ITEM_SIZES = (8, 24, 60, 96)  # numbers of embeddings in an item


def stress_requests(count: int, seed: int) -> Iterator[Request]:
    """Yield `count` random requests. Equal seeds give equal requests. Prefixes, media, tenants and priorities
    are mixed. One prompt in eight has two to four answers, and each answer is a request.
    """
    rng = random.Random(seed)
    prefixes = [_tokens(rng, rng.randint(16, 96)) for _ in range(NUM_PREFIXES)]
    made = 0
    while made < count:
        first = _request(rng, f"r{made}", prefixes)
        answers = rng.randint(2, 4) if rng.random() < 0.125 else 1
        for index in range(min(answers, count - made)):
            name = f"r{made + index}"
            yield (
                first
                if not index
                else replace(first, request_id=name, sample_index=index, group=first.request_id)
            )
        made += answers


def _request(rng: random.Random, name: str, prefixes: list[list[int]]) -> Request:
    prompt = list(rng.choice(prefixes)) if rng.random() < 0.75 else []
    prompt += _tokens(rng, rng.randint(1, 40))
    media = []
    while rng.random() < 0.4 and len(prompt) < 120 and len(media) < 3:
        media.append(_item(rng, len(prompt)))
        prompt += [1] * (media[-1].end - len(prompt)) + _tokens(rng, rng.randint(1, 12))
    sampling = SamplingParams(max_tokens=rng.choice((1, 8, 32, 64)), seed=1, ignore_eos=rng.random() < 0.5)
    return Request(
        request_id=name,
        prompt_token_ids=np.array(prompt[:255], np.int32),
        sampling=sampling,
        media=tuple(media),
        priority=rng.randint(-1, 1),
        cache_salt=rng.choice(("", "", "one tenant", "another")),
    )


def _item(rng: random.Random, start: int) -> MediaItem:
    """Return an image, or a video with text between its frames. Only a few contents exist, so that requests
    share encoder outputs.
    """
    number, size = rng.randrange(NUM_PICTURES), rng.choice(ITEM_SIZES)
    frames = rng.choice((1, 1, 2))
    runs = tuple((start + frame * (size // frames + 3), size // frames) for frame in range(frames))
    content = bytes((number, size, frames)).ljust(32, b"\0")
    return MediaItem(content, "image" if frames == 1 else "video", runs, (frames, 2, size))


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(2, 1000) for _ in range(count)]
