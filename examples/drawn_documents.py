"""Draw 30 documents with known fields, and count the fields that `mmengine extract` read correctly.

    python examples/drawn_documents.py draw FOLDER
    mmengine extract FOLDER --schema FOLDER/schema.json --out answers.jsonl \\
        --prompt "Describe the image as JSON."
    python examples/drawn_documents.py score FOLDER answers.jsonl

The documents are pictures and PDF pages of drawn scenes, because the included model reads only such scenes.
They are not in the model's training data. For your own documents, write truth.jsonl by hand: a line is
{"document": "name.png", "value": {…}}.
"""

import argparse
import json
import random
from pathlib import Path

from PIL import ImageFilter

from mmengine.serve.extraction.columns import leaves
from mmengine_shapes.questions import scene_json, scene_schema
from mmengine_shapes.scenes import random_scene

NUM_DOCUMENTS, SEED = 30, 51
MAX_BLUR = 0.03  # Maximum blur radius, as a fraction of the picture's side.
BINS = (0.0, 0.5, 0.9, 0.99, 1.0)
# The scalars in a JSON value, keyed by JSON pointer.
Leaves = dict[str, object]


def draw(folder: Path) -> None:
    """Write the documents (every third a PDF file), schema.json and truth.jsonl.

    Random blur makes some fields unreadable.
    """
    rng = random.Random(SEED)
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number in range(NUM_DOCUMENTS):
        scene = random_scene(rng, side=rng.choice((96, 128, 192, 256)))
        name = f"{number:02}.{'pdf' if number % 3 == 2 else 'png'}"
        picture = scene.draw().filter(ImageFilter.GaussianBlur(scene.side * rng.uniform(0, MAX_BLUR)))
        picture.save(folder / name, **({"resolution": 150} if name.endswith("pdf") else {}))
        lines.append(json.dumps({"document": name, "value": json.loads(scene_json(scene))}))
    (folder / "truth.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "schema.json").write_text(json.dumps(scene_schema(), indent=2))
    print(f"{NUM_DOCUMENTS} documents are in {folder}")


def score(folder: Path, answers: Path) -> list[str]:
    """Return the report's lines: right documents, right fields, and right fields for each range of
    probabilities (BINS).
    """
    truths = {line["document"]: dict(leaves(line["value"])) for line in _lines(folder / "truth.jsonl")}
    documents, right, fields = 0, 0, 0
    marks: list[tuple[float, bool]] = []  # (probability, is right) for each read field
    for row in _lines(answers):
        truth = truths[Path(row["document"]).name]
        read: Leaves = dict(leaves(row["value"]))
        documents += read == truth
        fields += len(truth)
        right += sum(pointer in read and read[pointer] == value for pointer, value in truth.items())
        marks += [
            (field["p"], pointer in truth and read.get(pointer) == truth[pointer])
            for pointer, field in row["confidence"].items()
        ]
    lines = [f"{documents} of {len(truths)} documents right", f"{right} of {fields} fields right"]
    for low, high in zip(BINS, BINS[1:], strict=False):
        found = [(p, good) for p, good in marks if low <= p < high or (high == 1.0 and p == 1.0)]
        if found:
            mean = sum(p for p, _ in found) / len(found)
            share = sum(good for _, good in found)
            lines.append(f"p from {low:g} to {high:g}: {share} of {len(found)} right, mean p {mean:.3f}")
    return lines


def _lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("draw", "score"):
        command = commands.add_parser(name)
        command.add_argument("folder", type=Path)
    command.add_argument("answers", type=Path)
    given = parser.parse_args()
    if given.command == "draw":
        draw(given.folder)
    else:
        print(*score(given.folder, given.answers), sep="\n")


if __name__ == "__main__":
    main()
