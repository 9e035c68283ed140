"""Compare embeddings with sentence-transformers: texts of 16 to 512 tokens, and images.

    python -m benchmarks embeddings            # needs the environment of `make clients`
    python -m benchmarks embeddings --quick    # small models; only tests that everything runs
    python -m benchmarks embeddings --folder models --measured turns.jsonl --minutes 7    # in several runs

mmengine and sentence-transformers load the same random bfloat16 weights in separate processes, and
alternately embed the same inputs. sentence-transformers sorts texts by length and embeds batches of 32. A
turn embeds such a batch in both processes. `--batches` measures only some evenly spaced batches.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
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
# Environment variables for both processes.
SIDE_VARIABLES = {
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "plugins")]),
    "HF_HUB_OFFLINE": "1",
}
OURS, THEIRS = "mmengine", "sentence-transformers"
TIMES = 1.5  # target speed-up
SHORTEST, LONGEST, BATCH = 16, 512, 32
IMAGES = 8  # images per turn
QUERY_LONGEST = 64  # tokens of a query, without the instruction
WIDTHS = 320, 800  # of the photographs, in pixels
Inputs = list[str] | list[dict[str, str]]
Numbered = dict[int, Inputs]  # batch number -> inputs


class Side:
    """A process that embeds with mmengine or with sentence-transformers."""

    def __init__(self, name: str, folder: Path, threads: int, scratch: Path) -> None:
        self._out = scratch / f"{name}.npy"
        python = ENVIRONMENT if name == THEIRS else Path(sys.executable)
        script = Path(__file__).with_name("embeddings_side.py")
        self._process = subprocess.Popen(
            [str(python), "-W", "ignore", str(script), name, str(folder), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **SIDE_VARIABLES},
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
        """Return the wall and CPU seconds, and the vectors."""
        assert self._process.stdin is not None
        self._process.stdin.write(
            json.dumps({"inputs": inputs, "prompt": prompt, "out": str(self._out)}) + "\n"
        )
        self._process.stdin.flush()
        return self._read(), np.load(self._out)


@dataclass(frozen=True, slots=True)
class Turn:
    """The seconds that both processes took for the same batch, keyed by library."""

    part: str
    number: int
    inputs: int
    wall: dict[str, float]
    cpu: dict[str, float]
    cosine: float  # smallest cosine between the two libraries' vectors

    @property
    def ratio(self) -> float:
        return self.cpu[THEIRS] / self.cpu[OURS]


def _turn(line: str) -> Turn:
    return Turn(**json.loads(line))


class Turns:
    """The measured turns. With `path`, turns are appended to a file, and later runs skip recorded turns.

    `minutes`: after this time `measure` starts no turn and raises SystemExit.
    """

    def __init__(self, path: Path | None, minutes: float | None) -> None:
        self._path = path
        self._until = None if minutes is None else time.monotonic() + minutes * 60
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        self._found = {(turn.part, turn.number): turn for turn in map(_turn, lines)}

    def measure(self, part: str, folder: Path, turns: Numbered, threads: int, prompt: str = "") -> list[Turn]:
        """Embed each turn's inputs with both libraries. The library that starts alternates."""
        missing = [number for number in turns if (part, number) not in self._found]
        if missing:
            self._measure(part, folder, turns, missing, threads, prompt)
        found = [self._found[part, number] for number in turns]
        if [each.inputs for each in found] != [len(inputs) for inputs in turns.values()]:
            raise SystemExit(f"{self._path} has turns with other numbers of inputs: delete the file")
        return found

    def _measure(
        self, part: str, folder: Path, turns: Numbered, missing: list[int], threads: int, prompt: str
    ) -> None:
        with tempfile.TemporaryDirectory() as scratch, ExitStack() as running:
            sides = {
                side: running.enter_context(Side(side, folder, threads, Path(scratch)))
                for side in (OURS, THEIRS)
            }
            for each in sides.values():
                each.embed(turns[missing[0]][:1], prompt)  # warm-up
            for at, number in enumerate(missing):
                if self._until is not None and time.monotonic() > self._until:
                    raise SystemExit(f"{part}: {len(missing) - at} of {len(turns)} turns are left: run again")
                seconds, vectors = {}, {}
                for side in (OURS, THEIRS)[:: -1 if at % 2 else 1]:
                    seconds[side], vectors[side] = sides[side].embed(turns[number], prompt)
                wall = {side: told["wall"] for side, told in seconds.items()}
                cpu = {side: told["cpu"] for side, told in seconds.items()}
                cosine = float((vectors[OURS] * vectors[THEIRS]).sum(1).min())
                self._add(Turn(part, number, len(turns[number]), wall, cpu, cosine))

    def _add(self, turn: Turn) -> None:
        self._found[turn.part, turn.number] = turn
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(asdict(turn)) + "\n")


def summary(turns: list[Turn]) -> tuple[Table, Target]:
    name = turns[0].part
    table = Table(name, ("", "inputs", "s", "CPU s", "inputs per CPU s", "mmengine is faster by, CPU s"))
    count = sum(turn.inputs for turn in turns)
    cpu = {side: sum(turn.cpu[side] for turn in turns) for side in (OURS, THEIRS)}
    ratio = cpu[THEIRS] / cpu[OURS]
    for side, used in cpu.items():
        table.rows.append(
            (
                side,
                str(count),
                f"{sum(turn.wall[side] for turn in turns):.1f}",
                f"{used:.1f}",
                f"{count / used:.2f}",
                f"{ratio:.2f}" if side == OURS else "",
            )
        )
    ratios = sorted(turn.ratio for turn in turns)
    table.notes.append(
        f"{len(turns)} turns; ratios of the turns {ratios[0]:.2f} to {ratios[-1]:.2f}. "
        f"Smallest cosine between the two sides' vectors: {min(turn.cosine for turn in turns):.4f}."
    )
    return table, Target(name, ratio, TIMES)


def sampled(texts: list[str], lengths: np.ndarray, batches: int) -> Numbered:
    """Sort all texts by length into batches, as sentence-transformers does. Return `batches` evenly spaced
    batches.
    """
    order = np.argsort(-lengths, kind="stable")
    whole = [order[at : at + BATCH] for at in range(0, len(order), BATCH)]
    picked = sorted({(2 * turn + 1) * len(whole) // (2 * batches) for turn in range(batches)})
    return {
        each: [texts[at] for at in np.random.default_rng(each).permutation(whole[each])] for each in picked
    }


def text_turns(folder: Path, longest: int, count: int, batches: int | None, seed: int) -> Numbered:
    """Return turns of texts whose numbers of tokens are evenly distributed from SHORTEST to `longest`."""
    lengths = np.random.default_rng(seed).integers(SHORTEST, longest + 1, count)
    return sampled(random_texts(folder, lengths), lengths, batches or -(-count // BATCH))


def image_turns(folder: Path, count: int, widths: tuple[int, int]) -> Numbered:
    given = [{"image": path} for path in photographs(folder, count, widths)]
    return {at // IMAGES: given[at : at + IMAGES] for at in range(0, count, IMAGES)}


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Use small models and few inputs.")] = False,
    texts: Annotated[int, typer.Option(min=BATCH, help="Number of texts that the sample stands for.")] = 1000,
    batches: Annotated[
        int | None, typer.Option(min=1, help="Number of turns with 32 texts (default: all texts).")
    ] = None,
    images: Annotated[int, typer.Option(min=1, help="Number of images, in turns of 8.")] = 24,
    threads: Annotated[int, typer.Option(min=1, help="Threads for each side.")] = 1,
    layers: Annotated[
        int | None, typer.Option(help="Layers of the image model's text part and tower (default 28 and 24).")
    ] = None,
    part: Annotated[list[str] | None, typer.Option(help="Only these parts: texts, queries, images.")] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Folder to keep the models in (default: a temporary folder).")
    ] = None,
    measured: Annotated[
        Path | None, typer.Option(help="File of measured turns, which a later run continues.")
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="Start no turn after this many minutes.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Markdown file for the tables (default for a full run: in results/).")
    ] = None,
) -> None:
    """Embed the same inputs on both sides."""
    if not ENVIRONMENT.exists():
        raise SystemExit("sentence-transformers is not installed: run `make clients` first")
    parts, turns = part or ["texts", "queries", "images"], Turns(measured, minutes)
    if quick:
        batches = batches or 1
    found: list[tuple[Table, Target]] = []
    with tempfile.TemporaryDirectory(prefix="embeddings-") as temporary:
        root = folder or Path(temporary)
        words, sights = root / "text", root / "image"
        if not words.is_dir() and {"texts", "queries"} & set(parts):
            make_text_model(words, small=quick)
        if not sights.is_dir() and "images" in parts:
            make_image_model(sights, small=quick, layers=layers)
        if "texts" in parts:
            longest = 64 if quick else LONGEST
            inputs = text_turns(words, longest, texts, batches, 0)
            name = f"Texts of {SHORTEST} to {longest} tokens, 0.6 B shape"
            found.append(summary(turns.measure(name, words, inputs, threads)))
        if "queries" in parts:
            inputs = text_turns(words, QUERY_LONGEST, texts, batches, 4)
            name = f"Queries of {SHORTEST} to {QUERY_LONGEST} tokens after an instruction, 0.6 B shape"
            found.append(summary(turns.measure(name, words, inputs, threads, "query")))
        if "images" in parts:
            inputs = image_turns(Path(temporary), 4 if quick else images, (96, 128) if quick else WIDTHS)
            cut = f" with {layers} layers each" if layers else ""
            name = f"Photographs {WIDTHS[0]} to {WIDTHS[1]} pixels wide, 2 B shape{cut}"
            found.append(summary(turns.measure(name, sights, inputs, threads)))
    tables = [*(table for table, _ in found), target_table([target for _, target in found])]
    lines = machine_lines(threads)
    show(tables, lines)
    if out is None and not quick and not part and not batches and layers is None:
        out = RESULTS
    if out is not None:
        out.write_text(markdown(TITLE, tables, lines), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
