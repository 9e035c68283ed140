"""Read a folder of images into typed values, and mark the fields with low confidence for a person to check.

    python examples/receipts.py PICTURES --below 0.99 --page review.html

If the folder is empty, the script first draws 50 images into the folder. The page shows each picture beside
its fields, the least certain picture first.
"""

import argparse
import asyncio
import base64
import random
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Literal, NamedTuple

from msgspec import Struct, to_builtins
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from mmengine import AsyncEngine
from mmengine_shapes.scenes import COLOURS, POSITIONS, SHAPES, SIZES, random_scene

PICTURES = (".png", ".jpg", ".jpeg", ".webp")


class Item(Struct):
    position: Literal[POSITIONS]
    shape: Literal[SHAPES]
    colour: Literal[tuple(COLOURS)]
    size: Literal[tuple(SIZES)]


class Receipt(Struct):
    objects: list[Item]


class Read(NamedTuple):
    """A picture's value. `sure`: a field's JSON pointer -> the model's confidence."""

    path: Path
    receipt: Receipt
    sure: Mapping[str, float]

    @property
    def rows(self) -> list[list[tuple[str, float]]]:
        """Each object's fields as pairs (text, confidence)."""
        objects = to_builtins(self.receipt)["objects"]
        return [
            [(value, self.sure[f"/objects/{number}/{name}"]) for name, value in item.items()]
            for number, item in enumerate(objects)
        ]


async def read(folder: Path) -> list[Read]:
    for k in range(0 if any(folder.iterdir()) else 50):
        random_scene(random.Random(k)).draw().save(folder / f"{k:02}.png")
    ask = {"type": "text", "text": "Describe the image as JSON."}
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in PICTURES)
    if not paths:
        raise SystemExit(f"{folder} has no pictures ({', '.join(PICTURES)})")
    prompts = [[{"role": "user", "content": [{"type": "image", "image": str(path)}, ask]}] for path in paths]
    async with AsyncEngine() as engine, asyncio.TaskGroup() as group:
        answers = [
            group.create_task(engine.generate_json(prompt, Receipt, confidence=True)) for prompt in prompts
        ]
        found = [await answer for answer in track(answers, "reading")]
    return [
        Read(path, value, {pointer: field.p for pointer, field in confidence.items()})
        for path, (value, confidence) in zip(paths, found, strict=True)
    ]


def table(found: list[Read], below: float) -> Table:
    """Return a table with a row for each object. Fields less certain than `below` show their confidence."""
    shown = Table("picture", *Item.__struct_fields__)
    for each in found:
        for row in each.rows:
            cells = [text if p >= below else f"[bold red]{text}? {p:.2f}[/]" for text, p in row]
            shown.add_row(Text(each.path.name), *cells)
    return shown


def page(found: list[Read], below: float) -> str:
    """Return an HTML page with each picture and its fields, the least certain picture first."""
    parts = ["<!doctype html><meta charset=utf-8><title>Review</title><style>td, th {padding: 4px 12px}"]
    parts.append("tr {vertical-align: top} .check {background: #fcc}</style><table>")
    for each in sorted(found, key=lambda one: min(one.sure.values(), default=1.0)):
        data = base64.b64encode(each.path.read_bytes()).decode()
        parts.append(
            f"<tr><th>{escape(each.path.name)}<td><img alt='' src='data:image/png;base64,{data}'><td>"
        )
        for row in each.rows:
            marks = [
                f"<span class='{'check' if p < below else ''}' title='{p:.4f}'>{escape(text)}</span>"
                for text, p in row
            ]
            parts.append(", ".join(marks) + "<br>")
    return "\n".join([*parts, "</table>\n"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--below", type=float, default=0.99, help="mark fields with a smaller confidence")
    parser.add_argument("--page", type=Path, help="file for the HTML page")
    options = parser.parse_args()
    found = asyncio.run(read(options.folder))
    Console().print(table(found, options.below))
    if options.page:
        options.page.write_text(page(found, options.below))


if __name__ == "__main__":
    main()
