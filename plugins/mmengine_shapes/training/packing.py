"""Packs scenes and questions into training batches.

A row is a tree: a prefix (system prompt, images) and several independent branches, each a question with its
answer. A branch attends to the prefix and to itself, but to no other branch. A branch's positions continue
from the prefix's end. All answers in a row share the encoded images.

`collate` returns these arrays for B rows of L tokens with V views of P patches each:

* ids (B, L) int64; positions (3, B, L) int64
* segments (B, L) int64: 0 for the prefix, 1 and up for branches, -1 for padding
* targets (B, L) int64, -100 without a target; weights (B, L) fp32
* patches (V, P, 1536) fp32; grid: patches per side
* slots (V * P/4,) int64: indices of the merged visual tokens in the flattened (B * L) batch
* labels (V * P/4, K) fp32: the visible content of each visual token
"""

import functools
import pathlib
import random

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer

from mmengine_shapes.questions import clip_questions, image_questions, pair_questions
from mmengine_shapes.scenes import COLOURS, POSITIONS, SHAPES, SIZES, Scene, random_clip, random_scene
from mmengine_shapes.training.mixture import Stage, draw_task, draw_text
from mmengine_shapes.training.texts import SYSTEM_PROMPTS, facts, filler, text_pair

PATCH, MERGE = 16, 2
KINDS = (*SHAPES, *COLOURS, *SIZES, *POSITIONS)  # The labels of a visual token, each a flag.
Turns = list[tuple[str, str]]
View = tuple[Image.Image, Image.Image, Scene]  # Two frames, and the scene that gives the labels.


class Row:
    """A packed sequence under construction, with at most `length` tokens."""

    def __init__(self, packer: "Packer", length: int) -> None:
        self.packer, self.length = packer, length
        self.ids: list[int] = []
        self.positions: list[tuple[int, int, int]] = []
        self.segments: list[int] = []
        self.targets: list[int] = []
        self.weights: list[float] = []
        self.slots: list[int] = []
        self.views: list[View] = []
        self.next_position = 0
        self.branches = 0

    def text(self, string: str) -> None:
        """Append text to the prefix."""
        for token in self.packer.encode(string):
            self._append(token, (self.next_position,) * 3)
            self.next_position += 1

    def vision(self, view: View, token: int) -> None:
        """Append a view's placeholders to the prefix: (side / 32)^2 merged tokens."""
        self.views.append(view)
        across = view[2].side // (PATCH * MERGE)
        base = self.next_position
        for cell in range(across * across):
            self.slots.append(len(self.ids))
            self._append(token, (base, base + cell // across, base + cell % across))
        self.next_position = base + across

    def _append(self, token: int, position: tuple[int, int, int]) -> None:
        self.ids.append(token)
        self.positions.append(position)
        self.segments.append(self.branches)
        self.targets.append(-100)
        self.weights.append(0.0)

    def branch(self, turns: Turns, weight: float) -> bool:
        """Append a conversation. If the conversation does not fit, change nothing and return False."""
        ids, asked = self.packer.conversation(turns)
        if len(self.ids) + len(ids) > self.length:
            return False
        self.branches += 1
        for k, token in enumerate(ids):
            self._append(token, (self.next_position + k,) * 3)
            if k + 1 < len(ids) and asked[k + 1]:
                self.targets[-1], self.weights[-1] = ids[k + 1], weight
        return True


class Packer:
    """Makes random rows, and tokenizes them."""

    def __init__(self, folder: pathlib.Path, rng: random.Random) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.rng = rng
        self.image_id = self._id("<|image_pad|>")
        self.video_id = self._id("<|video_pad|>")
        self.pad_id = self._id("<|endoftext|>")
        self.encode = functools.lru_cache(maxsize=100_000)(self._encode)

    def _id(self, token: str) -> int:
        found = self.tokenizer.token_to_id(token)
        if found is None:
            raise KeyError(f"the tokenizer has no {token}")
        return found

    def _encode(self, string: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(string, add_special_tokens=False).ids)

    def conversation(self, turns: Turns) -> tuple[list[int], list[bool]]:
        r"""Return the turns' token ids without the first "<|im_start|>user\n". Also return whether each token
        is a target.
        """
        ids: list[int] = []
        asked: list[bool] = []
        for number, (question, answer) in enumerate(turns):
            before = "\n<|im_start|>user\n" if number else ""
            opening = self.encode(f"{before}{question}<|im_end|>\n<|im_start|>assistant\n")
            reply = self.encode(f"{answer}<|im_end|>")
            ids += [*opening, *reply]
            asked += [False] * len(opening) + [True] * len(reply)
        return ids, asked

    def opening(self, row: Row, long: bool) -> None:
        """Append the system prompt, if there is one, and the beginning of the user's turn."""
        draw = self.rng.random()
        if long:
            row.text(f"<|im_start|>system\n{filler(self.rng, self.rng.randint(8, 24))}<|im_end|>\n")
        elif draw < 0.25:
            row.text(f"<|im_start|>system\n{self.rng.choice(SYSTEM_PROMPTS)}<|im_end|>\n")
        row.text("<|im_start|>user\n")

    def image(self, row: Row, scene: Scene) -> None:
        """Append an image to the prefix."""
        picture = scene.draw()
        row.text("<|vision_start|>")
        row.vision((picture, picture, scene), self.image_id)
        row.text("<|vision_end|>")

    def scene(self, side: int, stage: Stage) -> Scene:
        """Return a training scene. Scenes with more shapes are more frequent."""
        return random_scene(self.rng, side, "train", count=self.rng.choices((1, 2, 3, 4), stage.counts)[0])

    def row(self, kind: str, side: int, length: int, stage: Stage, long: bool) -> Row:
        """Return a row. `kind`: image, pair, clip or text."""
        if kind == "text":
            return self.text_row(length, stage, long)
        if kind == "image":
            return self.image_row(side, length, stage, long)
        return (self.pair_row if kind == "pair" else self.clip_row)(side, length, stage)

    def image_row(self, side: int, length: int, stage: Stage, long: bool) -> Row:
        """Return a row about one image: a JSON branch, then other questions until the row is full."""
        row = Row(self, length)
        self.opening(row, long)
        scene = self.scene(side, stage)
        self.image(row, scene)
        questions = image_questions(scene, self.rng)
        row.branch(questions["json"], 1.0)
        self.fill(row, questions, stage)
        return row

    def pair_row(self, side: int, length: int, stage: Stage) -> Row:
        """Return a row about two images."""
        row = Row(self, length)
        self.opening(row, False)
        first, second = self.scene(side, stage), self.scene(side, stage)
        self.image(row, first)
        self.image(row, second)
        self.fill(row, pair_questions(first, second, self.rng), stage)
        return row

    def clip_row(self, side: int, length: int, stage: Stage) -> Row:
        """Return a row about a video. In half of the rows, vision start and end tokens also enclose the whole
        video.

        transformers 5.23 keeps the template's tokens around the whole video; earlier versions and other
        engines drop them. The model learns both variants.
        """
        row = Row(self, length)
        self.opening(row, False)
        clip = random_clip(self.rng, side, "train")
        frames, wrapped = clip.frames(), self.rng.random() < 0.5
        row.text("<|vision_start|>" if wrapped else "")
        for k, seconds in enumerate(clip.timestamps()):
            row.text(f"<{seconds:.1f} seconds><|vision_start|>")
            row.vision((frames[2 * k], frames[2 * k + 1], clip.scenes[2 * k]), self.video_id)
            row.text("<|vision_end|>")
        row.text("<|vision_end|>" if wrapped else "")
        self.fill(row, clip_questions(clip, self.rng), stage)
        return row

    def text_row(self, length: int, stage: Stage, long: bool) -> Row:
        """Return a row without images: separate small tasks, or questions about a long text."""
        row = Row(self, length)
        rng = self.rng
        if long:
            text, pairs = facts(rng, rng.randint(3, 8), rng.randint(10, 28))
            row.text(f"<|im_start|>user\n{text}\n")
            for pair in pairs:
                row.branch([pair], 2.0)
            return row
        self.opening(row, False)
        while row.branch(self._text_turns(stage), 1.0):
            pass
        return row

    def _text_turns(self, stage: Stage) -> Turns:
        """Return a text task, two text tasks, or a name and a question about that name."""
        rng, draw = self.rng, self.rng.random()
        pair = text_pair(rng, draw_text(rng, stage))
        if draw < 0.8:
            return [pair]
        if draw < 0.9:
            return [pair, text_pair(rng, draw_text(rng, stage))]
        name = text_pair(rng, "person_json")[0].split(" ")[0]
        return [(f"My name is {name}.", f"Hello {name}."), ("What is my name?", f"Your name is {name}.")]

    def fill(self, row: Row, questions: dict[str, Turns], stage: Stage) -> None:
        """Append branches, chosen by the stage's weights, until three branches did not fit or no question is
        left.
        """
        open_tasks = {task: list(pairs) for task, pairs in questions.items() if pairs and task != "json"}
        misses = 0
        while open_tasks and misses < 3:
            task = draw_task(self.rng, list(open_tasks), stage)
            pairs = open_tasks[task]
            turns = [pairs.pop(self.rng.randrange(len(pairs)))]
            if not pairs:
                del open_tasks[task]
            if self.rng.random() < 0.12:
                other = self.rng.choice([pairs for pairs in questions.values() if pairs])
                turns.insert(0, self.rng.choice(other))
            long_answer = task in ("describe", "describe_in")
            misses += not row.branch(turns, 1.0 if long_answer else stage.lookup_weight)


def patches_of(views: list[View]) -> torch.Tensor:
    """Return the pixels of views, fp32 (V, P, 1536). The patches have the processors' merge-block order."""
    pixels = np.stack([np.stack([np.asarray(first), np.asarray(second)]) for first, second, _ in views])
    count, _, side, _, _ = pixels.shape
    across = side // (PATCH * MERGE)
    blocks = pixels.reshape(count, 2, across, MERGE, PATCH, across, MERGE, PATCH, 3)
    blocks = blocks.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
    flat = np.ascontiguousarray(blocks).reshape(count, (across * MERGE) ** 2, -1)
    return torch.from_numpy(flat).float() / 127.5 - 1.0


def labels_of(views: list[View]) -> torch.Tensor:
    """Return the labels of each merged token, fp32 flags (V * P/4, len(KINDS)): the properties of the shape
    whose centre lies in the token.
    """
    across = views[0][2].side // (PATCH * MERGE)
    labels = torch.zeros(len(views), across * across, len(KINDS))
    for number, (_, _, scene) in enumerate(views):
        for thing in scene.things:
            cell = int(thing.y * across) * across + int(thing.x * across)
            for word in (thing.shape, thing.colour, thing.size, thing.position):
                labels[number, cell, KINDS.index(word)] = 1.0
    return labels.view(-1, len(KINDS))


def collate(rows: list[Row], length: int, pad_id: int, side: int) -> dict:
    """Stack rows into the batch that the module's docstring describes."""

    def padded(values: list, empty: object) -> list:
        return values + [empty] * (length - len(values))

    views = [view for row in rows for view in row.views]
    slots = [number * length + slot for number, row in enumerate(rows) for slot in row.slots]
    positions = torch.tensor([padded(row.positions, (0, 0, 0)) for row in rows])
    return {
        "ids": torch.tensor([padded(row.ids, pad_id) for row in rows]),
        "positions": positions.permute(2, 0, 1).contiguous(),
        "segments": torch.tensor([padded(row.segments, -1) for row in rows]),
        "targets": torch.tensor([padded(row.targets, -100) for row in rows]),
        "weights": torch.tensor([padded(row.weights, 0.0) for row in rows]),
        "patches": patches_of(views),
        "slots": torch.tensor(slots),
        "labels": labels_of(views),
        "grid": side // PATCH,
    }
