"""Compare embeddings with sentence-transformers: texts of 16 to 512 tokens, and images.

    python -m benchmarks embeddings            # needs the environment of `make clients`
    python -m benchmarks embeddings --quick    # small models; only tests that everything runs

Both sides load the same random bfloat16 weights, each in its own process, and embed the same inputs in turns.
sentence-transformers sorts texts by length and embeds batches of 32. A turn has as many texts as one of these
batches, so that the padding in a sample of `--batches` turns is the same as for all `--texts` texts.
"""

import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.common.report import Table, Target, machine_lines, markdown, show, target_table
from benchmarks.pooling.models import make_image_model, make_text_model, photographs, random_texts

TITLE = "Embeddings on a CPU, beside sentence-transformers"
ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "embeddings_cpu.md"
ENVIRONMENT = ROOT / "build" / "clients" / "sentence" / "bin" / "python"
OURS, THEIRS = "mmengine", "sentence-transformers"
TIMES = 1.5  # target
SHORTEST, LONGEST, BATCH = 16, 512, 32
QUERY_LONGEST = 64  # tokens of a query, without the instruction
WIDTHS = 320, 800  # of the photographs, in pixels
Inputs = list[str] | list[dict[str, str]]


class Side:
    """One side's process."""

    def __init__(self, name: str, folder: Path, threads: int, scratch: Path) -> None:
        self._out = scratch / f"{name}.npy"
        python = ENVIRONMENT if name == THEIRS else Path(sys.executable)
        script = Path(__file__).with_name("embeddings_side.py")
        path = os.pathsep.join([str(ROOT), str(ROOT / "plugins")])
        self._process = subprocess.Popen(
            [str(python), "-W", "ignore", str(script), name, str(folder), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        )

    def __enter__(self) -> "Side":
        self._read()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{' '.join(map(str, self._process.args))} has ended")  # type: ignore[arg-type]
        return json.loads(line)

    def embed(self, inputs: Inputs, prompt: str) -> tuple[dict[str, float], np.ndarray]:
        """Return the elapsed seconds and the seconds of CPU time, and the vectors."""
        assert self._process.stdin is not None
        self._process.stdin.write(
            json.dumps({"inputs": inputs, "prompt": prompt, "out": str(self._out)}) + "\n"
        )
        self._process.stdin.flush()
        return self._read(), np.load(self._out)


def compare(
    name: str, folder: Path, turns: list[Inputs], threads: int, prompt: str = ""
) -> tuple[Table, Target]:
    """Embed each turn's inputs on both sides, and every second turn in reverse order."""
    seconds: dict[str, dict[str, float]] = {side: {"wall": 0.0, "cpu": 0.0} for side in (OURS, THEIRS)}
    ratios, alike = [], []
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as running:
        sides = {
            side: running.enter_context(Side(side, folder, threads, Path(scratch))) for side in (OURS, THEIRS)
        }
        for each in sides.values():
            each.embed(turns[0][:1], prompt)  # first steps, which are not measured
        for number, inputs in enumerate(turns):
            told, vectors = {}, {}
            for side in (OURS, THEIRS)[:: -1 if number % 2 else 1]:
                told[side], vectors[side] = sides[side].embed(inputs, prompt)
                for clock in ("wall", "cpu"):
                    seconds[side][clock] += told[side][clock]
            ratios.append(told[THEIRS]["cpu"] / told[OURS]["cpu"])
            alike.append(float((vectors[OURS] * vectors[THEIRS]).sum(1).min()))
    table = Table(name, ("", "inputs", "s", "CPU s", "inputs per CPU s", "mmengine is faster by, CPU s"))
    count = sum(len(inputs) for inputs in turns)
    ratio = seconds[THEIRS]["cpu"] / seconds[OURS]["cpu"]
    for side, found in seconds.items():
        table.rows.append(
            (
                side,
                str(count),
                f"{found['wall']:.1f}",
                f"{found['cpu']:.1f}",
                f"{count / found['cpu']:.2f}",
                f"{ratio:.2f}" if side == OURS else "",
            )
        )
    table.notes.append(
        f"{len(turns)} turns; ratios of the turns {', '.join(f'{each:.2f}' for each in ratios)}. "
        f"Smallest cosine between the two sides' vectors: {min(alike):.4f}."
    )
    return table, Target(name, ratio, TIMES)


def sampled(texts: list[str], lengths: np.ndarray, batches: int) -> list[Inputs]:
    """Return some of the batches that sentence-transformers makes of all texts, evenly spaced by length."""
    order = np.argsort(-lengths, kind="stable")
    whole = [order[at : at + BATCH] for at in range(0, len(order), BATCH)]
    picked = sorted({(2 * turn + 1) * len(whole) // (2 * batches) for turn in range(batches)})
    chance = np.random.default_rng(3)
    return [[texts[at] for at in chance.permutation(whole[each])] for each in picked]


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Use small models and few inputs.")] = False,
    texts: Annotated[int, typer.Option(min=BATCH, help="Number of texts that the sample stands for.")] = 1000,
    batches: Annotated[int, typer.Option(min=1, help="Number of turns with 32 texts.")] = 4,
    images: Annotated[int, typer.Option(min=1, help="Number of images, in turns of 8.")] = 24,
    threads: Annotated[int, typer.Option(min=1, help="Threads for each side.")] = 1,
    layers: Annotated[
        int | None, typer.Option(help="Layers of the image model's text part and tower (default 28 and 24).")
    ] = None,
    part: Annotated[list[str] | None, typer.Option(help="Only these parts: texts, queries, images.")] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Folder to keep the models in (default: a temporary folder).")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Markdown file for the tables (default for a full run: in results/).")
    ] = None,
) -> None:
    """Embed the same inputs on both sides."""
    if not ENVIRONMENT.exists():
        raise SystemExit("sentence-transformers is not installed: run `make clients` first")
    parts, chance = part or ["texts", "queries", "images"], np.random.default_rng(0)
    found: list[tuple[Table, Target]] = []
    with tempfile.TemporaryDirectory(prefix="embeddings-") as temporary:
        root = folder or Path(temporary)
        words, sights = root / "text", root / "image"
        if not words.is_dir() and {"texts", "queries"} & set(parts):
            make_text_model(words, small=quick)
        if not sights.is_dir() and "images" in parts:
            make_image_model(sights, small=quick, layers=layers)
        if "texts" in parts:
            lengths = chance.integers(SHORTEST, (64 if quick else LONGEST) + 1, texts)
            turns = sampled(random_texts(words, lengths), lengths, batches)
            name = f"Texts of {SHORTEST} to {lengths.max()} tokens, 0.6 B shape"
            found.append(compare(name, words, turns, threads))
        if "queries" in parts:
            lengths = chance.integers(SHORTEST, QUERY_LONGEST + 1, texts)
            turns = sampled(random_texts(words, lengths), lengths, batches)
            name = f"Queries of {SHORTEST} to {QUERY_LONGEST} tokens after an instruction, 0.6 B shape"
            found.append(compare(name, words, turns, threads, "query"))
        if "images" in parts:
            count = 4 if quick else images
            paths = photographs(Path(temporary), count, (96, 128) if quick else WIDTHS)
            cut = f" with {layers} layers each" if layers else ""
            given = [{"image": path} for path in paths]
            turns = [given[at : at + 8] for at in range(0, count, 8)]
            found.append(
                compare(
                    f"Photographs {WIDTHS[0]} to {WIDTHS[1]} pixels wide, 2 B shape{cut}",
                    sights,
                    turns,
                    threads,
                )
            )
    tables = [*(table for table, _ in found), target_table([target for _, target in found])]
    lines = machine_lines(threads)
    show(tables, lines)
    if out is None and not quick and not part and layers is None:
        out = RESULTS
    if out is not None:
        out.write_text(markdown(TITLE, tables, lines), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
