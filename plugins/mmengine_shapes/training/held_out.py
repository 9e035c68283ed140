"""Generates held-out conversations and their pictures for each task, to evaluate the model.

Scenes and clips have held-out layouts, which training never uses. Text items come from the same closed sets
as in training.
"""

import random
from dataclasses import dataclass

from PIL import Image

from mmengine_shapes.questions import (
    CLIP_TASKS,
    IMAGE_TASKS,
    PAIR_TASKS,
    clip_questions,
    image_questions,
    pair_questions,
)
from mmengine_shapes.scenes import Clip, random_clip, random_scene
from mmengine_shapes.training.texts import TEXT_TASKS, facts, filler, text_pair

MIXED_SIDES = (64, 96, 128, 160, 192, 224, 256)
EXTRA_TASKS = ("two_turns", "long_system_json", "long_system_where", "long_facts")
TASKS = (*IMAGE_TASKS, *PAIR_TASKS, *CLIP_TASKS, *EXTRA_TASKS, *TEXT_TASKS)


@dataclass(frozen=True)
class Item:
    """A conversation without its last answer, with its media and the expected answer."""

    task: str
    messages: list[dict]
    answer: str
    images: tuple[Image.Image, ...] = ()
    clip: Clip | None = None


def user(question: str, images: int = 0, video: bool = False) -> dict:
    """Return a user message: pictures first, then the question."""
    parts = [{"type": "image"}] * images + [{"type": "video"}] * video
    return {"role": "user", "content": [*parts, {"type": "text", "text": question}]}


def held_out_items(task: str, number: int, side: int | None = 96, seed: int = 0) -> list[Item]:
    """Return `number` items of a task. With `side` None, every item has a random size."""
    rng = random.Random(f"held out {seed} {task} {side}")
    return [draw_item(task, side, rng) for _ in range(number)]


def draw_item(task: str, side: int | None, rng: random.Random, split: str = "held_out") -> Item:
    """Return an item about a random scene in `split` that fits the task."""
    if task in TEXT_TASKS:
        question, answer = text_pair(rng, task)
        return Item(task, [user(question)], answer)
    if task == "long_facts":
        text, pairs = facts(rng, rng.randint(3, 8), rng.randint(10, 28))
        question, answer = rng.choice(pairs)
        return Item(task, [user(f"{text}\n{question}")], answer)
    while True:
        item = _picture_item(task, side or rng.choice(MIXED_SIDES), rng, split)
        if item:
            return item


def _picture_item(task: str, side: int, rng: random.Random, split: str) -> Item | None:
    """Return an item about a random scene, pair of scenes or clip, or None if the task does not fit the
    scene.
    """
    if task in CLIP_TASKS:
        clip = random_clip(rng, min(side, 96), split)
        pairs = clip_questions(clip, rng)[task]
        return Item(task, [user(pairs[0][0], video=True)], pairs[0][1], clip=clip) if pairs else None
    scene = random_scene(rng, side, split)
    questions = image_questions(scene, rng)
    images: tuple[Image.Image, ...] = (scene.draw(),)
    if task in PAIR_TASKS:
        other = random_scene(rng, side, split)
        questions, images = pair_questions(scene, other, rng), (scene.draw(), other.draw())
    if task == "two_turns":
        return _two_turns(questions, images, rng)
    pairs = questions[{"long_system_json": "json", "long_system_where": "where"}.get(task, task)]
    if not pairs:
        return None
    question, answer = rng.choice(pairs)
    messages = [user(question, images=len(images))]
    if task.startswith("long_system"):
        messages.insert(0, {"role": "system", "content": filler(rng, rng.randint(8, 24))})
    return Item(task, messages, answer, images)


def _two_turns(questions: dict, images: tuple[Image.Image, ...], rng: random.Random) -> Item:
    """Return an item with two questions about an image, and the correct answer to the first question."""
    open_tasks = [pairs for pairs in questions.values() if pairs]
    (first, reply), (second, answer) = rng.choice(rng.choice(open_tasks)), rng.choice(rng.choice(open_tasks))
    messages = [user(first, images=1), {"role": "assistant", "content": reply}, user(second)]
    return Item("two_turns", messages, answer, images)
