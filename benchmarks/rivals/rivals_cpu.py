"""Compares CPU engines on the same random text decoder: mmengine, llama.cpp, OpenVINO, transformers.

benchmarks/rivals/environment.sh          # once: builds llama.cpp, some 15 minutes
python -m benchmarks rivals_cpu           # everything into benchmarks/results/rivals_cpu.md
python -m benchmarks rivals_cpu --shape small --rounds 1 --out -    # a minute, a smoke test

Each engine runs in a separate process (benchmarks/rivals/*_side.py). Engines with the same number of bits per
weight take turns with the same prompts and threads, in a random order each round. Each figure is the median
over rounds. The times of the other engines cover only the model's forward on fixed tokens. mmengine's times
cover whole engine steps, including events and sampling. Unless --out is "-", a run adds its results to
build/rivals/found.json, and the tables show all results in that file.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import IO, Annotated

import numpy as np
import typer

from benchmarks.common.report import Table, Target, machine_lines, markdown, show, target_table
from benchmarks.rivals import models

HERE = Path(__file__).parent

RESULTS = HERE.parent / "results" / "rivals_cpu.md"
FOUND = models.BUILD / "found.json"
TITLE = "Engines for CPUs, side by side"
# Prompt tokens per row. LONG applies to a single row, and SHORT applies to ROWS rows.
LONG, SHORT, ROWS = 512, 32, 16
STEPS = {1: 16, ROWS: 8}  # Steps per turn, keyed by the number of rows.
# Prompts contain only token ids below this limit.
IDS = 1500
TEXT = 256  # Number of positions at which the next-token distributions are compared.
OURS = "mmengine"


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine to measure. `side`: the script's name without _side.py. `form`: a format from models.make.
    `more`: the script's arguments after the number of threads.
    """

    name: str
    side: str
    form: str
    more: tuple[str, ...] = ()


# The engines for each number of bits per weight; mmengine comes first.
GROUPS = {
    16: (
        Engine(f"{OURS}, bf16", OURS, "bf16", ("none", "model")),
        Engine("llama.cpp, BF16", "llama", "BF16"),
        Engine("OpenVINO, bf16", "openvino", "openvino/bf16"),
        Engine("transformers, bf16", "transformers", "bf16", ("bfloat16",)),
    ),
    8: (
        Engine(f"{OURS}, int8 g 32", OURS, "bf16", ("int8", "model")),
        Engine(f"{OURS}, int8 g 32, int8 activations", OURS, "bf16", ("int8", "int8")),
        Engine(f"{OURS}, the Q8_0 file", OURS, "Q8_0", ("none", "model")),
        Engine("llama.cpp, Q8_0", "llama", "Q8_0"),
        Engine("OpenVINO, int8", "openvino", "openvino/int8"),
    ),
    4: (
        Engine(f"{OURS}, int4 g 128", OURS, "int4", ("none", "model")),
        Engine("llama.cpp, Q4_K_M", "llama", "Q4_K_M"),
    ),
}
TRUTH = Engine("transformers, float32", "transformers", "bf16", ("float32",))
# The engine to beat, by bits per weight. mmengine must be as fast with a single row, and MANY_BAR times as
# fast with ROWS rows.
WANTED = {16: "llama.cpp, BF16", 8: "llama.cpp, Q8_0"}
MANY_BAR = 1.5
Found = dict[str, dict[str, float]]  # Maps an engine to its figures: bits per weight, KLD, bytes, seconds.


def main(
    shape: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(models.SHAPES)}.")] = None,
    bits: Annotated[
        list[int] | None, typer.Option(help="Bits per weight: 16, 8, 4 (default: all); 0: tables only.")
    ] = None,
    threads: Annotated[int, typer.Option(help="Threads for every engine; 0: one per CPU.")] = 0,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    out: Annotated[Path, typer.Option(help="Markdown file for the tables; -: none.")] = RESULTS,
) -> None:
    """Measure on this machine."""
    if not models.PYTHON.exists():
        sys.exit("the other engines are not installed: run benchmarks/rivals/environment.sh first")
    threads = threads or len(os.sched_getaffinity(0))
    writes = str(out) != "-"
    found = json.loads(FOUND.read_text()) if writes and FOUND.exists() else {}
    for each in shape or models.DEFAULT_SHAPES:
        folders = models.make(each)
        for group in [of for of in bits or GROUPS if of]:
            name = f"{each}, {group} bits"

            def keep(made: Found, name: str = name) -> None:
                found[name] = made
                if writes:
                    FOUND.write_text(json.dumps(found))

            _measured(folders, group, threads, rounds, keep)
    tables, targets = [], []
    for name in sorted(found, key=lambda name: (name.split(",")[0], -int(name.split()[-2]))):
        table, reached = _table(name, found[name])
        tables.append(table)
        targets += reached
    show([*tables, target_table(targets)], lines := machine_lines(threads))
    if writes:
        out.write_text(markdown(TITLE, [*tables, target_table(targets)], lines), encoding="utf-8")


class Process:
    """A running engine, in a separate process. `greeting`: the first line that the process writes."""

    def __init__(self, command: Sequence[str | Path], threads: int, **variables: str) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"} | variables
        self._process = subprocess.Popen(
            list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._asks: IO[str] = self._process.stdin
        self._answers: IO[str] = self._process.stdout
        self.greeting = self._answer()

    @classmethod
    def of(cls, engine: Engine, folders: dict[str, Path], threads: int) -> "Process":
        python = models.PYTHON if engine.side in ("llama", "openvino") else sys.executable
        script = HERE / f"{engine.side}_side.py"
        return cls([python, script, folders[engine.form], str(threads), *engine.more], threads)

    def ask(self, **what: object) -> dict:
        print(json.dumps(what), file=self._asks, flush=True)
        return self._answer()

    def _answer(self) -> dict:
        line = self._answers.readline()
        if not line:
            sys.exit(f"{self._process.args} ended with {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        self._asks.close()
        self._process.wait()


def _measured(
    folders: dict[str, Path], group: int, threads: int, rounds: int, keep: Callable[[Found], None]
) -> None:
    """Measure the engines with `group` bits per weight, and call `keep` with the results after each round."""
    chance = random.Random(7)
    text = [chance.randrange(IDS) for _ in range(TEXT)]
    truth, weights = _truth(folders, threads, text), models.num_weights(folders["bf16"])
    sides = {engine.name: Process.of(engine, folders, threads) for engine in GROUPS[group]}
    found: Found = {}
    with tempfile.TemporaryDirectory(dir=models.BUILD) as scratch:
        for name, side in sides.items():
            side.ask(logits=str(path := Path(scratch) / "logits.npy"), tokens=text)
            bits = 8 * side.greeting["weight_bytes"] / weights
            found[name] = {"bits": bits, **_apart(truth, _log_softmax(path))}
    took: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds):
        for rows, name, answer in answers_in_turns(sides, chance):
            took.setdefault((name, f"step {rows}"), []).append(median(answer["steps"]))
            took.setdefault((name, f"prompt {rows}"), []).append(answer["prompt"])
            found[name]["rss"] = answer["rss"]
        for (name, what), seconds in took.items():
            found[name][what] = median(seconds)
            found[name]["rounds"] = number + 1
        keep(found)
    for side in sides.values():
        side.close()


def answers_in_turns(sides: Mapping[str, Process], chance: random.Random) -> Iterator[tuple[int, str, dict]]:
    """Ask all engines in random order, for each number of rows. Yield (rows, engine, the measured times)."""
    for rows, count in STEPS.items():
        length = LONG if rows == 1 else SHORT
        prompts = [[chance.randrange(IDS) for _ in range(length)] for _ in range(rows)]
        tokens = [[chance.randrange(IDS) for _ in range(rows)] for _ in range(count)]
        for name in chance.sample(list(sides), len(sides)):
            yield rows, name, sides[name].ask(prompts=prompts, tokens=tokens)


def _truth(folders: dict[str, Path], threads: int, text: list[int]) -> np.ndarray:
    """Return the float32 model's log-probabilities for `text`.

    A file beside the models stores the logits. If the file is missing, a separate process computes them.
    """
    path = folders["bf16"].parent / "truth.npy"
    if not path.exists():
        side = Process.of(TRUTH, folders, threads)
        side.ask(logits=str(path), tokens=text)
        side.close()
    return _log_softmax(path)


def _log_softmax(path: Path) -> np.ndarray:
    """Return the log-softmax of the logits in a file, float32 [n, vocabulary]."""
    logits = np.load(path)
    logits -= logits.max(1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(1, keepdims=True))
    return logits


def _apart(truth: np.ndarray, said: np.ndarray) -> dict[str, float]:
    divergence = (np.exp(truth) * (truth - said)).sum(1)
    return {"kld": float(divergence.mean()), "same": float((truth.argmax(1) == said.argmax(1)).mean())}


def _table(name: str, found: dict[str, dict]) -> tuple[Table, list[Target]]:
    ours = next(iter(found.values()))
    table = Table(
        f"{name} a weight",
        (
            *("", "bits a weight", "KLD", "same top token", "RSS, MB"),
            *("1 row, tokens/s", "ours is faster by", f"{ROWS} rows, tokens/s", "ours is faster by"),
            *(f"prompt of {LONG}, tokens/s", "ours is faster by"),
        ),
    )
    bits = int(name.split()[-2])
    targets = []
    for engine, of in found.items():
        cells = [
            engine,
            f"{of['bits']:.2f}",
            f"{of['kld']:.5f}",
            f"{of['same']:.1%}",
            f"{of['rss'] / 1e6:,.0f}",
        ]
        for what, tokens in (("step 1", 1), (f"step {ROWS}", ROWS), ("prompt 1", LONG)):
            ratio = of[what] / ours[what]
            cells += [f"{tokens / of[what]:.1f}", f"{ratio:.2f}"]
            if engine == WANTED.get(bits) and what.startswith("step"):
                bar = 1.0 if tokens == 1 else MANY_BAR
                targets.append(
                    Target(f"{name}: {what.removeprefix('step ')} row(s), of {engine}", ratio, bar)
                )
        table.rows.append(cells)
    table.notes.append(f"Medians of {ours['rounds']:.0f} round(s).")
    return table, targets


if __name__ == "__main__":
    typer.run(main)
