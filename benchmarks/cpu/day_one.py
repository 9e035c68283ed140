"""Measure a user's first minutes with two billion weights: loading, first tokens, decode and memory.

    python -m benchmarks day_one # half an hour, 5 GB of disk, writes benchmarks/results/day_one_cpu.md
    python -m benchmarks day_one --quick # a small model; only tests that everything runs
    python -m benchmarks day_one --telephone 900 # also a photograph of 4,000 x 3,000, for at most 900 s
    python -m benchmarks day_one --telephone 900 --layers 2 --tower-layers 2 # on a slow machine

The benchmark writes a checkpoint folder with Qwen3-VL-2B's shapes and vocabulary. The weights are random
bfloat16 numbers, in shards as on the hub. mmengine and transformers load the folder and answer in separate
processes. "Cold" means that the page cache contains no weights.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks.common.measure import usable_cpus
from benchmarks.common.report import Table, Target, machine_lines, markdown, show, target_table
from benchmarks.cpu.day_one_side import dd_s, drop, shards

TITLE = "The first minutes with two billion weights, on a CPU"
BENCHMARKS = Path(__file__).resolve().parents[1]
RESULTS = BENCHMARKS / "results" / "day_one_cpu.md"
VOCABULARY = BENCHMARKS.parent / "build" / "vocabularies" / "ggml-vocab-qwen2.gguf"
# Maximum ratios. COLD: cold load / disk read. WARM: warm load / copy in memory. PRIVATE: private memory /
# (weights + KV pool). FIRST: mmengine's time to the first token / transformers' time.
COLD, WARM, PRIVATE, FIRST = 1.3, 1.5, 1.15, 0.6
LIMIT_S = 1800.0  # maximum time for one process
OURS, THEIRS = "mmengine", "transformers"


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Use a small model, and one round.")] = False,
    layers: Annotated[int | None, typer.Option(help="Number of text layers (default 28).")] = None,
    tower_layers: Annotated[
        int | None, typer.Option(help="Number of vision tower layers (default 24).")
    ] = None,
    vocabulary: Annotated[
        Path, typer.Option(help="Qwen's vocabulary as a GGUF file; `make test` fetches it.")
    ] = VOCABULARY,
    rounds: Annotated[int, typer.Option(min=1, help="Number of times that each load is measured.")] = 3,
    telephone: Annotated[
        float, typer.Option(min=0, help="Maximum seconds for a photograph of 4,000 x 3,000; 0: send none.")
    ] = 0.0,
    folder: Annotated[
        Path | None, typer.Option(help="Folder to keep the model in (default: a temporary folder).")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Markdown file for the tables (default for a full run: in results/).")
    ] = None,
) -> None:
    """Measure loading and answering, as a user would do them."""
    cut = layers is not None or tower_layers is not None
    if out is None and not quick and not cut:
        out = RESULTS
    with tempfile.TemporaryDirectory(prefix="day-one-") as temporary:
        model = (folder or Path(temporary)) / "model"
        if not model.is_dir():
            _make(model, None if quick else vocabulary, quick, layers, tower_layers)
        found = Day(model, Path(temporary), 1 if quick else rounds, quick)
        tables, targets = found.load()
        more, wanted = found.answers(telephone)
    tables, targets = [*tables, *more], [*targets, *wanted]
    tables, lines = [*tables, target_table(targets)], machine_lines(found.threads)
    if cut:
        lines.append(f"Layers: text {layers or 'all'}, vision tower {tower_layers or 'all'}.")
    show(tables, lines)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(markdown(TITLE, tables, lines), encoding="utf-8")


def _make(
    model: Path, vocabulary: Path | None, small: bool, layers: int | None, tower_layers: int | None
) -> None:
    """Write the model in a separate process, to free its memory afterwards."""
    if vocabulary is not None and not vocabulary.is_file():
        raise SystemExit(f"no vocabulary at {vocabulary}: run `make test` to fetch it, or set --vocabulary")
    given = None if vocabulary is None else f"Path({str(vocabulary)!r})"
    code = (
        "from pathlib import Path; from benchmarks.common.large_model import make; "
        f"make(Path({str(model)!r}), {given}, small={small}, layers={layers}, "
        f"tower_layers={tower_layers})"
    )
    subprocess.run([sys.executable, "-c", code], cwd=BENCHMARKS.parent, check=True)


class Day:
    """Measurements of the model in `folder`."""

    def __init__(self, folder: Path, scratch: Path, rounds: int, small: bool) -> None:
        self._folder, self._scratch, self._rounds, self._small = folder, scratch, rounds, small
        self._weights = sum(path.stat().st_size for path in shards(folder))
        self.threads = max(1, len(usable_cpus()))

    def load(self) -> tuple[list[Table], list[Target]]:
        """Measure cold and warm loading, and for comparison a disk read (dd) and a copy in memory."""
        took: dict[str, list[float]] = {}
        imports: dict[str, list[float]] = {}

        def note(name: str, run: Callable[[], dict[str, Any]]) -> None:
            found = run()
            took.setdefault(name, []).append(found["load_s"])
            imports.setdefault(name, []).append(found["import_s"])

        for _ in range(self._rounds):
            drop(self._folder)
            took.setdefault("dd, cold", []).append(dd_s(self._folder))
            for side in (OURS, THEIRS):
                drop(self._folder)
                note(f"{side}, cold", lambda side=side: self._side(side))
            note("as much new memory, written once", lambda: self._side("touch"))
            note("read and copied once in torch, warm", lambda: self._side("copy"))
            for side in (OURS, THEIRS):
                note(f"{side}, warm", lambda side=side: self._side(side))
        table = Table(
            f"Loading {self._weights / 1e9:.2f} GB of bfloat16: seconds",
            ("", "median", "least", "most", "imports before"),
        )
        for name, seconds in took.items():
            before = f"{median(imports[name]):.1f}" if name in imports else ""
            ends = (f"{each:.2f}" for each in (median(seconds), min(seconds), max(seconds)))
            table.rows.append((name, *ends, before))
        table.notes.append(
            f"Medians of {self._rounds}, each in its own process. Cold: the weights' pages were dropped "
            "with posix_fadvise; the disk's host may still cache them. mmengine's time is that of "
            "Engine(folder): tokenizer, fingerprint, packed weights, KV pool, grammar engine. transformers "
            "maps the weights and reads them when it first computes. New memory: the time that any copy of "
            "the weights waits for pages."
        )
        cold, warm = (median(took[f"{OURS}, {state}"]) for state in ("cold", "warm"))
        disk, copied = median(took["dd, cold"]), median(took["read and copied once in torch, warm"])
        return [table], [
            Target("load, cold, times of dd", cold / disk, COLD, most=True),
            Target("load, warm, times of a copy in torch", warm / copied, WARM, most=True),
        ]

    def answers(self, telephone: float) -> tuple[list[Table], list[Target]]:
        """Measure memory, the time to the first token, and decode rates."""
        from benchmarks.common.large_model import photograph

        side = 64 if self._small else 1024
        picture = photograph(self._scratch / "photograph.jpg", side, side)
        rows = (1, 2) if self._small else (1, 4, 16)
        words = ["--photograph", str(picture), *(word for count in rows for word in ("--rows", str(count)))]
        found = {name: self._side(name, *words) for name in (OURS, THEIRS)}
        sizes = ("private memory at most, GB", "pages of files with it, GB")
        rates = [f"{count} row{'s' * (count > 1)}, tokens/s" for count in rows]
        table = Table("Answers", ("", f"first token, {side:,} x {side:,} photograph, s", *rates, *sizes))
        for name, each in found.items():
            speeds = (f"{each['rates'][str(count)]:.2f}" for count in rows)
            memory = (f"{each[key] / 1e9:.2f}" for key in ("peak_private", "peak"))
            table.rows.append((name, f"{each['first_s'][0]:.1f}", *speeds, *memory))
        ours = found[OURS]
        private, holds = ours["peak_private"], self._weights + ours["kv_bytes"]
        table.notes += [
            f"mmengine's log line: {ours['line']}.",
            "The first token answers the first question after loading. Reading and preparing the photograph "
            "counts in mmengine's time, and not in transformers'. Rates are medians over decode steps after "
            "64 tokens, without drafts.",
            "Private memory is RssAnon, sampled every 20 ms, imports included: "
            f"{private / holds:.2f} times weights and full KV pool, {private / self._weights:.2f} times the "
            "weights alone.",
        ]
        first = [each["first_s"][0] for each in found.values()]
        targets = [
            Target("private memory, times of weights and pool", private / holds, PRIVATE, most=True),
            Target("first token, share of transformers'", first[0] / first[1], FIRST, most=True),
        ]
        tables = [table]
        if telephone:
            tables.append(self._telephone(telephone))
        return tables, targets

    def _telephone(self, limit_s: float) -> Table:
        from benchmarks.common.large_model import photograph

        width, height = (256, 192) if self._small else (4000, 3000)
        picture = photograph(self._scratch / "telephone.jpg", width, height)
        table = Table(f"A photograph of {width:,} x {height:,}: seconds to the first token", ("", "seconds"))
        for name in (OURS, THEIRS):
            try:
                (seconds,) = self._side(name, "--photograph", str(picture), limit_s=limit_s)["first_s"]
                table.rows.append((name, f"{seconds:.1f}"))
            except subprocess.TimeoutExpired:
                table.rows.append((name, f"not within {limit_s:.0f}, loading included"))
        return table

    def _side(self, name: str, *words: str, limit_s: float = LIMIT_S) -> dict[str, Any]:
        command = [sys.executable, str(BENCHMARKS), "cpu.day_one_side", name, str(self._folder), *words]
        done = subprocess.run(
            [*command, "--threads", str(self.threads)], capture_output=True, text=True, timeout=limit_s
        )
        if done.returncode:
            raise SystemExit(f"{name} ended with {done.returncode}: {done.stderr[-2000:]}")
        last = done.stdout.splitlines()[-1]
        # Progress, because the whole run takes half an hour.
        print(f"{name} {' '.join(words)}: {last}", file=sys.stderr, flush=True)
        return json.loads(last)


if __name__ == "__main__":
    typer.run(main)
