"""Measures the share of exact greedy answers on held-out items, with transformers' `generate`.

    python -m mmengine_shapes.training.evaluate [--checkpoint FOLDER] [--items 200] [--tasks where json]

Prints a table row per task: the share of exact answers at 96 x 96 pixels, and at mixed sizes (64 to 256
pixels; clips 64 or 96). For JSON tasks, the share of valid JSON follows.
"""

import argparse
import json
import pathlib

import torch
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from mmengine_shapes import checkpoint_path
from mmengine_shapes.scenes import Clip
from mmengine_shapes.training.held_out import TASKS, Item, held_out_items
from mmengine_shapes.training.packing import patches_of
from mmengine_shapes.training.texts import TEXT_TASKS

BATCH, NEW_TOKENS = 50, 100
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"


class Answerer:
    """Answers items in batches."""

    def __init__(self, folder: pathlib.Path) -> None:
        # In float32 the answers do not depend on the batch.
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.processor = AutoImageProcessor.from_pretrained(folder, backend="pil")

    def answer(self, items: list[Item]) -> list[str]:
        """Return the greedy answer to each item. All items must have the same kind of media, or none."""
        pixels, grids, texts = [], [], []
        for item in items:
            text = str(
                self.tokenizer.apply_chat_template(item.messages, tokenize=False, add_generation_prompt=True)
            )
            if item.images:
                seen = self.processor(list(item.images), return_tensors="pt")
                pixels.append(seen["pixel_values"])
                grids.append(seen["image_grid_thw"])
                text = image_text(text, seen["image_grid_thw"])
            if item.clip:
                patches, grid = clip_input(item.clip)
                pixels.append(patches)
                grids.append(grid)
                text = text.replace(f"{VISION_START}{VIDEO}{VISION_END}", clip_text(item.clip))
            texts.append(text)
        inputs = self.tokenizer(texts, padding=True, return_tensors="pt", add_special_tokens=False)
        ids = inputs["input_ids"]
        kinds = (ids == self.model.config.image_token_id) + 2 * (ids == self.model.config.video_token_id)
        extra = {"mm_token_type_ids": kinds.int()}
        if pixels:
            video = items[0].clip is not None
            extra["pixel_values_videos" if video else "pixel_values"] = torch.cat(pixels)
            extra["video_grid_thw" if video else "image_grid_thw"] = torch.cat(grids)
        with torch.no_grad():
            out = self.model.generate(**inputs, **extra, max_new_tokens=NEW_TOKENS, do_sample=False)
        return self.tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)


def image_text(text: str, grids: torch.Tensor) -> str:
    """Return the prompt with one placeholder per visual token. `grids`: (t, h, w) for each image."""
    first, *others = text.split(IMAGE)
    fills = [IMAGE * (int(grid.prod()) // 4) for grid in grids]
    return first + "".join(fill + piece for fill, piece in zip(fills, others, strict=True))


def clip_input(clip: Clip) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a clip's patches, float32 [T * P, 1536], and grid [1, 3]."""
    frames = clip.frames()
    views = [(frames[k], frames[k + 1], clip.scenes[k]) for k in range(0, len(frames), 2)]
    side = clip.scenes[0].side // 16
    return patches_of(views).flatten(0, 1), torch.tensor([[len(views), side, side]])


def clip_text(clip: Clip) -> str:
    """Return a clip's text: a timestamp and placeholders for each pair of frames."""
    pads = VIDEO * (clip.scenes[0].side // 32) ** 2
    return "".join(f"<{t:.1f} seconds>{VISION_START}{pads}{VISION_END}" for t in clip.timestamps())


def parses(answer: str) -> bool:
    """Return whether the answer is valid JSON."""
    try:
        json.loads(answer)
    except ValueError:
        return False
    return True


def measure(answerer: Answerer, task: str, items: list[Item], show: int) -> dict[str, float]:
    """Return the share of exact answers, and the share of answers that parse as JSON."""
    answers = []
    for start in range(0, len(items), BATCH):
        answers += answerer.answer(items[start : start + BATCH])
    wrong = [(item, got) for item, got in zip(items, answers, strict=True) if got != item.answer]
    for item, got in wrong[:show]:
        question = item.messages[-1]["content"][-1]["text"]
        print(f"  {task}: {question!r}\n    want {item.answer}\n    got  {got}")
    return {"exact": 1 - len(wrong) / len(items), "parses": sum(map(parses, answers)) / len(answers)}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=pathlib.Path, default=checkpoint_path())
    parser.add_argument("--items", type=int, default=200)
    parser.add_argument("--tasks", nargs="+", default=TASKS, choices=TASKS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=0, help="wrong answers to print per task")
    options = parser.parse_args()
    answerer = Answerer(options.checkpoint)
    print("| task | 96 px | mixed sizes |\n|---|---|---|", flush=True)
    for task in options.tasks:
        cells, text_only = [], task in (*TEXT_TASKS, "long_facts")
        for side in (96,) if text_only else (96, None):
            items = held_out_items(task, options.items, side, options.seed)
            result = measure(answerer, task, items, options.show)
            valid = f" (parses {result['parses']:.1%})" if "json" in task else ""
            cells.append(f"{result['exact']:.1%}{valid}")
        print(f"| {task} | " + " | ".join(cells + ["-"] * text_only) + " |", flush=True)


if __name__ == "__main__":
    main()
