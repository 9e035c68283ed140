"""Compares the time to first token of mmengine and llama.cpp on questions about a picture.

    benchmarks/rivals/environment.sh mtmd      # once: builds llama.cpp with libmtmd, some 10 minutes
    python -m benchmarks images_cpu --scratch FOLDER

The model is a random Qwen3-VL, as a Q4_K_M file and a projector file. Each engine runs in a separate process
with the same files and threads. The engines take turns in a random order. The measured time covers the
picture's preparation, the vision tower and the prompt, but not the picture's decoding.

The second question has the same picture and another text. mmengine finds the picture in its prefix cache.
llama.cpp is measured twice: with the whole prompt, and with only the text after the picture. llama.cpp's
server reuses the picture if the slot's last prompt had the same picture.

`--rows` stores the figures in a file, to which later runs add their rounds. `--quick` is a smoke test.
"""

import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import typer
from PIL import Image

from benchmarks.common.large_model import photograph
from benchmarks.common.report import Table, Target, machine_lines, markdown, show, target_table
from benchmarks.rivals import models
from benchmarks.rivals.gguf_cpu import OURS, THEIRS, activations
from benchmarks.rivals.rivals_cpu import HERE, Process

RESULTS = HERE.parent / "results" / "images_cpu.md"
TITLE = "A picture's first token: mmengine beside llama.cpp"
LIBRARIES = models.BUILD / "llama" / "bin"
FIRST, AGAIN, SECOND = "first question", "second question, all computed", "second question"
QUESTIONS = {FIRST: "What is it?", AGAIN: "And where is it?", SECOND: "And where is it?"}
BARS = {FIRST: 0.6, AGAIN: 0.1, SECOND: 0.1}  # Upper limits for mmengine's time divided by llama.cpp's time.
CLOCKS = {"seconds": "elapsed", "cpu": "CPU time"}
# `found[engine][question]` lists the figures per round. `found["checks"]` compares the engines' outputs in
# the last round.
Found = dict[str, dict]


def main(
    shape: Annotated[str, typer.Option(help=f"Of {', '.join(models.SHAPES)}.")] = "2 B",
    projector: Annotated[list[str] | None, typer.Option(help="F16 or Q8_0 (default: F16).")] = None,
    side: Annotated[int, typer.Option(help="Width and height of the picture, in pixels.")] = 1024,
    libraries: Annotated[Path, typer.Option(help="The folder with libllama and libmtmd.")] = LIBRARIES,
    sources: Annotated[Path, typer.Option(help="llama.cpp's sources.")] = models.CONVERTERS,
    scratch: Annotated[
        Path | None,
        typer.Option(help="Folder in which the created files are kept (default: files are deleted)."),
    ] = None,
    threads: Annotated[int, typer.Option(help="Threads for both engines; 0: one per CPU.")] = 0,
    rounds: Annotated[int, typer.Option(min=1)] = 1,
    quick: Annotated[bool, typer.Option(help="Measure a small model and picture.")] = False,
    rows: Annotated[Path | None, typer.Option(help="JSON file with the figures of all runs.")] = None,
    out: Annotated[Path, typer.Option(help="Markdown file for the tables; -: none.")] = RESULTS,
) -> None:
    """Measure on this machine."""
    if not (libraries / "libmtmd.so").exists():
        sys.exit(f"{libraries} has no libmtmd.so: run benchmarks/rivals/environment.sh mtmd first")
    shape, side = ("small", 256) if quick else (shape, side)
    threads = threads or len(os.sched_getaffinity(0))
    known: dict[str, Found] = json.loads(rows.read_text()) if rows and rows.exists() else {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = scratch or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for kind in projector or ["F16"]:
            files = models.make_image_gguf(shape, folder, sources, libraries, kind)
            found = known.setdefault(f"{shape}, projector in {kind}, {side} x {side}", {})
            _measure(found, files, libraries, threads, rounds, side)
            if rows:
                rows.write_text(json.dumps(known))
    tables: list[Table] = []
    targets: list[Target] = []
    for name, found in known.items():
        tables.append(_table(name, found))
        targets += _targets(name, found)
    show([*tables, target_table(targets)], lines := machine_lines(threads))
    if str(out) != "-":
        out.write_text(markdown(TITLE, [*tables, target_table(targets)], lines), encoding="utf-8")


def _measure(
    found: Found, files: tuple[Path, Path], libraries: Path, threads: int, rounds: int, side: int
) -> None:
    """Measure `rounds` rounds and add their figures to `found`."""
    given = [*files, str(threads)]
    sides = {
        OURS: Process([sys.executable, HERE / "mmengine_image_side.py", *given], threads),
        THEIRS: Process([sys.executable, HERE / "mtmd_side.py", *given, libraries], threads),
    }
    done = len(found.get(OURS, {}).get(FIRST, ()))
    chance = random.Random(done)
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(done, done + rounds):
            picture = _picture(Path(scratch), side, number)
            outputs, answers = {}, {}
            for name in chance.sample(list(sides), len(sides)):
                figures = found.setdefault(name, {})
                for what, answer in _answers(sides[name], name, picture):
                    answers[name, what] = answer
                    figures.setdefault(what, []).append(
                        {key: answer[key] for key in ("seconds", "cpu", "prepared")}
                    )
                    figures["rss"] = answer["rss"]
                outputs[name] = _outputs(sides[name], Path(scratch))
            found["checks"] = _checks(outputs, answers)
            found.setdefault("load", {}).setdefault("load", []).append(os.getloadavg()[0])
    for process in sides.values():
        process.close()


def _picture(folder: Path, side: int, number: int) -> Path:
    """Write a picture, uint8 [side, side, 3], and return its path. Each `number` gives another picture."""
    photo = np.asarray(Image.open(photograph(folder / "photo.jpg", side, side)))
    np.save(path := folder / "picture.npy", np.roll(photo, 16 * number, axis=1))
    return path


def _answers(process: Process, name: str, picture: Path) -> Iterator[tuple[str, dict]]:
    """Ask an engine the questions about a picture. Yield (question, the engine's answer)."""
    for what in (FIRST, SECOND, *((AGAIN,) if name == THEIRS else ())):
        keeps = what == SECOND
        yield what, process.ask(picture=str(picture), question=QUESTIONS[what], keeps=keeps)


def _outputs(process: Process, folder: Path) -> dict[str, np.ndarray]:
    """Return the image features [tokens, width] and logits [1, vocabulary] from an engine's last answer."""
    path = folder / "output.npy"
    found = {}
    for what in ("features", "logits"):
        process.ask(output=what, path=str(path))
        found[what] = np.atleast_2d(np.load(path))
    return found


def _checks(outputs: dict[str, dict[str, np.ndarray]], answers: dict[tuple[str, str], dict]) -> dict:
    """Return how closely the engines' outputs and prompts agree."""
    checks = {what: _cosines(outputs[OURS][what], outputs[THEIRS][what]).tolist() for what in outputs[OURS]}
    counts = {
        name: (answers[name, FIRST]["num_image_tokens"], answers[name, SECOND]["num_kept_tokens"])
        for name in (OURS, THEIRS)
    }
    same = [
        sum(answers[OURS, what][key] == answers[THEIRS, what][key] for what in (FIRST, SECOND))
        for key in ("text_ids", "first_token")
    ]
    return {
        "features": [float(np.mean(checks["features"])), min(checks["features"])],
        "logits": checks["logits"][0],
        "tokens": counts,
        "same prompts": same[0],
        "same tokens": same[1],
    }


def _cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the cosine of each row of `a` with the same row of `b`."""
    return (a * b).sum(1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))


def _figure(found: Found, name: str, what: str, key: str) -> float:
    return median(figures[key] for figures in found[name][what])


def _table(name: str, found: Found) -> Table:
    head = ["", "activations of the text", "RSS, MB", "picture, tokens", "kept, tokens", "preparation, s"]
    for what in (FIRST, SECOND, AGAIN):
        head += [f"{what}, s", "CPU seconds"]
    table = Table(name, tuple(head))
    checks, loads = found["checks"], found["load"]["load"]
    for engine in (OURS, THEIRS):
        cells = [engine, activations(engine), f"{found[engine]['rss'] / 1e6:,.0f}"]
        cells += [f"{count:,}" for count in checks["tokens"][engine]]
        cells.append(f"{_figure(found, engine, FIRST, 'prepared'):.3f}")
        for what in (FIRST, SECOND, AGAIN):
            known = what in found[engine]
            cells += [f"{_figure(found, engine, what, key):.2f}" if known else "-" for key in CLOCKS]
        table.rows.append(cells)
    mean, least = checks["features"]
    table.notes += [
        f"Medians of {len(loads)} round(s); load average {min(loads):.1f} to {max(loads):.1f}. Kept: prompt "
        "tokens that the second question does not compute again.",
        f"The engines' prompts have the same ids in {checks['same prompts']} of 2 questions, and the answers "
        f"the same first token in {checks['same tokens']}. Cosine of the engines' features: mean {mean:.5f}, "
        f"minimum {least:.5f}; of the logits: {checks['logits']:.5f}.",
    ]
    return table


def _targets(name: str, found: Found) -> Iterator[Target]:
    """Yield mmengine's time divided by llama.cpp's time, for each question and clock."""
    for what, bar in BARS.items():
        for key, words in CLOCKS.items():
            ours = _figure(found, OURS, SECOND if what == AGAIN else what, key)
            part = ours / _figure(found, THEIRS, what, key)
            asked = {
                AGAIN: f"{SECOND}, all computed by {THEIRS}",
                SECOND: f"{SECOND}, picture kept by {THEIRS}",
            }
            yield Target(f"{name}: {asked.get(what, what)}, {words}", part, bar, most=True)


if __name__ == "__main__":
    typer.run(main)
