"""Draws the images of `mmengine demo`, and returns questions about the images with expected answers."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmengine_shapes.questions import clip_questions, image_questions, pair_questions
from mmengine_shapes.scenes import Scene, random_clip, random_scene

# For each of the six images: the number of shapes, and the tasks of its questions.
PLAN = (
    (2, ("describe",)),
    (3, ("json", "count")),
    (4, ("json", "where")),
    (3, ("colour_of", "size_of")),
    (4, ("what_at", "count_colour")),
    (1, ("background",)),
)


@dataclass(frozen=True)
class Question:
    """A question. `about`: the names of the question's pictures. `messages`: the prompt. `expected`: the
    right answer.
    """

    about: str
    text: str
    expected: str
    messages: list[dict[str, Any]]


def questions(folder: Path, seed: int) -> list[Question]:
    """Return twelve questions. Ten have a single image each, one has two images, and one has a video clip.

    Write the images to `folder` as PNG files. The training data does not contain the images.
    """
    rng = random.Random(seed)
    found: list[Question] = []
    paths, scenes = [], []
    for number, (count, tasks) in enumerate(PLAN, 1):
        scene = _scene(rng, count, tasks)
        path = folder / f"image{number}.png"
        scene.draw().save(path)
        paths.append(path)
        scenes.append(scene)
        found += [_question([path], *image_questions(scene)[task][0]) for task in tasks]
    found.append(_question(paths[:2], *pair_questions(scenes[0], scenes[1])["more"][0]))
    found.append(_clip_question(rng))
    return found


def _scene(rng: random.Random, count: int, tasks: tuple[str, ...]) -> Scene:
    """Return a scene outside the training data that allows a question for each task."""
    while True:
        scene = random_scene(rng, count=count)
        items = image_questions(scene)
        if all(items[task] for task in tasks):
            return scene


def _question(paths: list[Path], text: str, expected: str) -> Question:
    parts = [{"type": "image", "image": str(path)} for path in paths]
    return Question(" + ".join(path.name for path in paths), text, expected, _user(parts, text))


def _clip_question(rng: random.Random) -> Question:
    clip = random_clip(rng)
    text, expected = clip_questions(clip)["happens"][0]
    video = {"type": "video", "video": clip.frames(), "sample_fps": clip.fps}
    return Question(f"video of {len(clip.scenes)} frames", text, expected, _user([video], text))


def _user(parts: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
