"""Compares the speed of mmengine and llama.cpp's packaged kernels on a GGUF file, with equal threads.

    python -m benchmarks gguf_cpu FILE [FILE ...] --libraries FOLDER
    python -m benchmarks gguf_cpu --shape "2 B" --sources LLAMA_CPP --libraries FOLDER --no-error

FOLDER is bins/linux-x64 of the npm package @node-llama-cpp/linux-x64 (npm pack). `--requantise Q8_0` also
quantises the first file to Q8_0 with llama.cpp, and measures the result. `--shape` measures a random model in
Q4_K_M, made with llama.cpp's converter and quantiser. LLAMA_CPP is the folder with convert_hf_to_gguf.py
(vendor/llama.cpp in the sdist of llama-cpp-python); the converter needs sentencepiece.

Each engine runs in a separate process. The engines take turns with the same prompts, in a random order each
round. llama.cpp's time covers only the model's forward on fixed tokens. mmengine's time covers whole engine
steps. The table has elapsed time and CPU time, because other programs disturb CPU time less. `--rows` stores
the figures in a file, to which later runs add theirs.
"""

import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import typer

from benchmarks.common.report import Table, Target, machine_lines, markdown, show, target_table
from benchmarks.rivals import models
from benchmarks.rivals.packaged_llama import FILE_TYPES, quantise
from benchmarks.rivals.rivals_cpu import HERE, LONG, ROWS, Process, answers_in_turns
from mmengine.native.library import load
from mmengine.native.linear import multiplies_float32, prefers_int16

RESULTS = HERE.parent / "results" / "gguf_cpu.md"
TITLE = "GGUF files: mmengine beside llama.cpp"
IDS = 1500  # Prompts contain only token ids below this limit.
TEXT = 128  # Number of positions at which the next-token distributions are compared.
OURS, THEIRS = "mmengine", "llama.cpp"
BARS = {"step 1": 1.0, f"step {ROWS}": 2.0, "prompt 1": 1.0}
# Maps each engine's name to its seconds, bytes and KLD. The key "run" has the rounds and the load average.
Found = dict[str, dict[str, float]]


def main(
    libraries: Annotated[Path, typer.Option(help="The folder with libllama and libggml-cpu-*.")],
    files: Annotated[list[Path] | None, typer.Argument(help="GGUF files.")] = None,
    requantise: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(FILE_TYPES)}.")] = None,
    shape: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(models.SHAPES)}.")] = None,
    sources: Annotated[Path, typer.Option(help="llama.cpp's sources, for --shape.")] = models.CONVERTERS,
    scratch: Annotated[
        Path | None,
        typer.Option(help="Folder in which the created files are kept (default: files are deleted)."),
    ] = None,
    threads: Annotated[int, typer.Option(help="Threads for both engines; 0: one per CPU.")] = 0,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    error: Annotated[bool, typer.Option(help="Also measure the KLD, which needs float32 weights.")] = True,
    rows: Annotated[Path | None, typer.Option(help="JSON file with the figures of all runs.")] = None,
    out: Annotated[Path, typer.Option(help="Markdown file for the tables; -: none.")] = RESULTS,
) -> None:
    """Measure on this machine."""
    threads = threads or len(os.sched_getaffinity(0))
    known: dict[str, Found] = json.loads(rows.read_text()) if rows and rows.exists() else {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = scratch or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        given = list(files or ())
        if given:
            given += _requantised(given[0], requantise or (), libraries, folder)
        given += [models.make_gguf(each, folder, sources, libraries) for each in shape or ()]
        for file in given:
            found = _measured(file, libraries, threads, rounds, error)
            known[file.name] = found | {"run": {"rounds": rounds, "load": os.getloadavg()[0]}}
            if rows:
                rows.write_text(json.dumps(known))
    tables: list[Table] = []
    targets: list[Target] = []
    for name, found in known.items():
        table, reached = _table(name, found)
        tables.append(table)
        targets += reached
    show([*tables, target_table(targets)], lines := machine_lines(threads))
    if str(out) != "-":
        out.write_text(markdown(TITLE, [*tables, target_table(targets)], lines), encoding="utf-8")


def _requantised(file: Path, kinds: Sequence[str], libraries: Path, folder: Path) -> Iterator[Path]:
    """Yield the paths of the file quantised to each type in `kinds`."""
    for kind in kinds:
        path = folder / f"{file.stem}-{kind}.gguf"
        if not path.exists():
            quantise(libraries, file, path, kind)
        yield path


def _measured(file: Path, libraries: Path, threads: int, rounds: int, error: bool) -> Found:
    chance = random.Random(7)
    text = [chance.randrange(IDS) for _ in range(TEXT)]
    ours = [sys.executable, HERE / "mmengine_side.py", file, str(threads), "none", "model", "auto"]
    commands = {
        OURS: ours,
        THEIRS: [sys.executable, HERE / "llama_side.py", file, str(threads), libraries],
    }
    truth = _truth([*ours[:-1], "float32"], threads, text) if error else None
    sides = {name: Process(command, threads) for name, command in commands.items()}
    found: Found = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, side in sides.items():
            found[name] = {"bytes": side.greeting["weight_bytes"]}
            if truth is not None:
                side.ask(logits=str(path := Path(scratch) / "logits.npy"), tokens=text)
                found[name]["kld"] = _divergence(truth, np.load(path))
    took: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for rows, name, answer in answers_in_turns(sides, chance):
            for clock in ("", "_cpu"):
                took.setdefault((name, f"step {rows}{clock}"), []).append(median(answer[f"steps{clock}"]))
                took.setdefault((name, f"prompt {rows}{clock}"), []).append(answer[f"prompt{clock}"])
            found[name]["rss"] = answer["rss"]
    for (name, what), seconds in took.items():
        found[name][what] = median(seconds)
    for side in sides.values():
        side.close()
    return found


def activations(engine: str) -> str:
    """Return the default dtype of an engine's activations on this CPU."""
    if engine == THEIRS:
        return "int8 (Q8_K, Q8_0)"
    library = load()
    if library is not None and multiplies_float32(library):
        return "float32"
    return "bfloat16; int16 (Q8_0)" if library is not None and prefers_int16(library) else "bfloat16"


def _truth(command: Sequence[str | Path], threads: int, text: list[int]) -> np.ndarray:
    """Return the logits that torch computes in float32 with dequantised weights."""
    with tempfile.TemporaryDirectory() as scratch:
        side = Process(command, threads, MMENGINE_NATIVE="off")
        side.ask(logits=str(path := Path(scratch) / "truth.npy"), tokens=text)
        side.close()
        return np.load(path)


def _divergence(truth: np.ndarray, said: np.ndarray) -> float:
    """Return the mean KLD between two arrays of logits [n, vocabulary], in nats."""
    logs = []
    for logits in (truth, said):
        logits = logits.astype(np.float64) - logits.max(1, keepdims=True)
        logs.append(logits - np.log(np.exp(logits).sum(1, keepdims=True)))
    return float((np.exp(logs[0]) * (logs[0] - logs[1])).sum(1).mean())


def _table(name: str, found: Found) -> tuple[Table, list[Target]]:
    measures = (("step 1", 1), (f"step {ROWS}", ROWS), ("prompt 1", LONG))
    head = ["", "activations", "weights, MB", "RSS, MB", "KLD"]
    for what in ("1 row", f"{ROWS} rows", f"prompt of {LONG}"):
        head += [f"{what}, tokens/s", "tokens per CPU second"]
    table = Table(name, tuple(head))
    targets = []
    for engine in (OURS, THEIRS):
        of = found[engine]
        cells = [engine, activations(engine), f"{of['bytes'] / 1e6:,.0f}", f"{of['rss'] / 1e6:,.0f}"]
        cells.append(f"{of['kld']:.5f}" if "kld" in of else "-")
        for what, tokens in measures:
            cells += [f"{tokens / of[what]:.1f}", f"{tokens / of[f'{what}_cpu']:.1f}"]
        table.rows.append(cells)
    for what, _ in measures:
        for clock, words in (("", "elapsed"), ("_cpu", "CPU time")):
            ratio = found[THEIRS][what + clock] / found[OURS][what + clock]
            targets.append(Target(f"{name}: {what}, {words}, of {THEIRS}", ratio, BARS[what]))
    table.notes.append(
        f"Medians of {found['run']['rounds']:.0f} round(s); load average {found['run']['load']:.1f}. "
        "KLD: of the next token, to float32 on the file's weights."
    )
    return table, targets


if __name__ == "__main__":
    typer.run(main)
