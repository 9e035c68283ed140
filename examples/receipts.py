"""Convert a folder of images to a typed list, in one batch. An empty folder gets drawn images first."""

import asyncio
import random
import sys
from pathlib import Path
from typing import Literal

from msgspec import Struct
from rich.progress import track

from mmengine import AsyncEngine
from mmengine_shapes.scenes import COLOURS, POSITIONS, SHAPES, SIZES, random_scene


class Item(Struct):
    position: Literal[POSITIONS]
    shape: Literal[SHAPES]
    colour: Literal[tuple(COLOURS)]
    size: Literal[tuple(SIZES)]


class Receipt(Struct):
    objects: list[Item]


async def main(folder: Path) -> list[Receipt]:
    for k in range(0 if any(folder.iterdir()) else 50):
        random_scene(random.Random(k)).draw().save(folder / f"{k:02}.png")
    ask = {"type": "text", "text": "Describe the image as JSON."}
    parts = [[{"type": "image", "image": str(path)}, ask] for path in sorted(folder.iterdir())]
    async with AsyncEngine() as engine, asyncio.TaskGroup() as group:
        prompts = [[{"role": "user", "content": content}] for content in parts]
        answers = [group.create_task(engine.generate_json(prompt, Receipt)) for prompt in prompts]
        return [await answer for answer in track(answers, "reading")]


if __name__ == "__main__":
    print(*asyncio.run(main(Path(sys.argv[1]))), sep="\n")
