"""Compare mmengine with transformers on a model with half a billion bfloat16 weights, in one process.

    python -m benchmarks half_billion --threads 1 # throughput.py runs this for one core and for two

mmengine and transformers decode the same prompts and take turns every few steps. After mmengine's turn, the
benchmark times how fast the CPU reads as many bytes as the weights have. On a CPU without a fast bfloat16
product (AVX2 alone), `--quick` leaves transformers out and uses shorter prompts.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from benchmarks.common.measure import Sample, clocked, use_threads
from benchmarks.common.report import Part, Table, Target, machine_lines, show

CONTEXT = 300
BURST = 6  # steps per turn; the first step does not count
WANTED = {1: (1.6, 1.8), 16: (1.7, 2.0)}  # number of rows -> (target speedup, stretch goal)
FLOOR_SHARE = 0.8
QUICK_S = 25.0  # time limit for transformers with --quick
QUICK_TOKENS, QUICK_STEPS = 6_800, 60  # prompt tokens and steps that transformers computes with --quick
QUICK_CONTEXT, QUICK_PROMPT = 32, 64  # tokens, if transformers is left out
PROMPT = 512  # tokens in the prefill
TOKENS = 1500  # prompts use token ids below this number, because higher ids may be special
SALT = "decode"  # cache salt for all runs: only the first run computes the prompts
GROWING, STATIC, COMPILED = "growing cache", "static cache", "static cache, compiled"


def main(
    threads: Annotated[int, typer.Option(min=1, help="Threads for torch, and CPUs, on both sides.")] = 1,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer steps, a growing cache only, one minute.")
    ] = False,
    compiled: Annotated[
        bool, typer.Option(help="Also use torch.compile for transformers' model (a minute).")
    ] = True,
    folder: Annotated[Path | None, typer.Option(help="Model folder (default: a generated model).")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print everything as one JSON line.")] = False,
) -> None:
    """Measure both sides' decode and prefill with the same random weights."""
    use_threads(threads)
    part = measure(threads, quick, compiled and not quick, folder)
    if json_output:
        print(part.dumps())
    else:
        show(part.tables, machine_lines(threads))


@dataclass(slots=True)
class Steps:
    """Decode step times for one batch size. `theirs`: kind of KV cache -> transformers' times."""

    ours: list[Sample] = field(default_factory=list)
    theirs: dict[str, list[Sample]] = field(default_factory=dict)
    reads: list[float] = field(default_factory=list)  # seconds to read the weights' bytes once
    notes: list[str] = field(default_factory=list)

    def best(self) -> str:
        """Return the kind of cache that was fastest for transformers."""
        return min(self.theirs, key=lambda kind: _wall(self.theirs[kind]))

    def ratio(self) -> float:
        return _wall(self.theirs[self.best()]) / _wall(self.ours)

    def floor_share(self) -> float:
        return median(self.reads) / _wall(self.ours)


def measure(threads: int, quick: bool, compiled: bool, folder: Path | None) -> Part:
    import torch  # imported after the thread environment is set

    from benchmarks.common.engine_runner import EngineRunner
    from benchmarks.common.half_billion_model import cached_folder, text_bytes
    from benchmarks.common.reference import Reference
    from mmengine.config import EngineConfig

    torch.set_num_threads(threads)
    folder = folder or cached_folder()
    config = EngineConfig(max_model_len=1024, max_num_seqs=max(WANTED), num_blocks=max(WANTED) * 32)
    ours = EngineRunner(model=folder, dtype="bfloat16", config=config)
    reference, note = Reference(folder, torch.bfloat16), None
    if quick and (seconds := _expected_seconds(reference)) > QUICK_S:
        reference = None
        note = (
            f"transformers is left out: it would take about {seconds:.0f} s in bfloat16 on this CPU, and "
            f"--quick allows {QUICK_S:.0f} s. Prompts are shorter for the same reason."
        )
    pair = Pair(ours, reference, Reader(text_bytes(folder)))
    num_steps = (2 if reference is None else 3 if quick else 6) * BURST
    found = {}
    for rows in WANTED:
        kinds = [GROWING] if quick else [GROWING, STATIC]
        if compiled and rows == 1:  # with 16 rows, compiling took another minute and saved no time
            kinds.append(COMPILED)
        found[rows] = pair.decode(rows, num_steps, kinds)
    tables = [
        _decode_table(found, pair.context, threads, text_bytes(folder)),
        pair.prefill(2 if quick else 4),
    ]
    tables[0].notes += [note] if note else []
    ours.close()
    return Part(tables, _targets(found, threads))


def _expected_seconds(reference) -> float:
    """Estimate transformers' time with --quick, in seconds, from two short prompts."""
    from benchmarks.common.reference import make_inputs
    from benchmarks.common.workload import random_texts

    seconds = {}
    for length in (1, 32):
        (ask,) = random_texts(1, length, 1, TOKENS, seed=10)
        inputs = make_inputs([ask.prepared])
        reference.generate(inputs, 1)
        seconds[length] = clocked(lambda inputs=inputs: reference.generate(inputs, 1))[0].wall
    token = max(0.0, seconds[32] - seconds[1]) / 31
    return token * QUICK_TOKENS + seconds[1] * QUICK_STEPS


class Pair:
    """Runs mmengine, transformers and the memory reader in turns. `reference`: None without transformers."""

    def __init__(self, ours, reference, reader: "Reader") -> None:
        self._ours, self._reference, self._reader = ours, reference, reader
        self.context, self._prompt = (
            (CONTEXT, PROMPT) if reference is not None else (QUICK_CONTEXT, QUICK_PROMPT)
        )

    def decode(self, rows: int, num_steps: int, kinds: list[str]) -> Steps:
        from benchmarks.common.reference import describe_mismatches, make_inputs
        from benchmarks.common.workload import random_texts
        from benchmarks.cpu.share import clocked_steps, share

        if self._reference is None:
            return self._alone(rows, num_steps)
        num_new = num_steps + max(WANTED)  # rows that start early generate more tokens than the last row
        asks = random_texts(rows, self.context - num_steps // 2, num_new, TOKENS)
        steps, wanted, got = Steps(), [], []
        inputs = make_inputs([ask.prepared for ask in asks])
        for kind in kinds:
            answers, theirs = self._in_turn(asks, inputs, num_steps, kind, steps)
            got, wanted = got or answers, wanted or theirs
        singles = [make_inputs([ask.prepared]) for ask in asks]
        got = [answer[: num_steps + 1] for answer in got]
        steps.notes = describe_mismatches(self._reference, ["text"] * rows, singles, got, wanted, most=3)
        distinct = sorted(len(set(answer)) for answer in wanted)[rows // 2]
        steps.notes.append(
            f"{rows} row(s): {sum(map(_equal, got, wanted))} of {rows} answers are equal; an answer with "
            f"{num_steps + 1} tokens has {distinct} different ones."
        )
        rest = share(clocked_steps(self._ours, asks, num_steps, SALT))
        steps.notes.append(f"{rows} row(s): {rest:.1%} of a step is outside the model's forward.")
        return steps

    def _alone(self, rows: int, num_steps: int) -> Steps:
        """Time mmengine's steps and the memory reader in turns, without transformers."""
        from benchmarks.common.workload import random_texts

        # These prompts are so short that a single step computes all prompts. All rows then decode from the
        # next step on.
        asks = random_texts(rows, self.context - num_steps // 2, num_steps + 4, TOKENS)
        steps, running = Steps(), self._ours.begin(asks, SALT)
        running.start()
        for _ in range(num_steps // BURST):
            steps.ours += running.steps(BURST)[1:]
            steps.reads.append(self._reader.read())
        running.finish()
        return steps

    def _in_turn(self, asks, inputs, num_steps: int, kind: str, steps: Steps):
        """Run both engines, return their answers, and add their step times to `steps`."""
        from benchmarks.common.reference import TokenClock

        running = self._ours.begin(asks, SALT)
        running.start()

        def turn() -> None:
            steps.ours += running.steps(BURST)[1:]
            steps.reads.append(self._reader.read())

        clock = TokenClock(turn, BURST)
        options = {} if kind == GROWING else {"cache_implementation": "static"}
        if kind == COMPILED:
            with self._reference.compiled():
                self._reference.generate(inputs, 4, **options)
                theirs = self._reference.generate(inputs, num_steps + 1, clock, **options)
        else:
            theirs = self._reference.generate(inputs, num_steps + 1, clock, **options)
        steps.theirs[kind] = [each for n, each in enumerate(clock.samples) if n % BURST]
        return running.finish(), theirs

    def prefill(self, rounds: int) -> Table:
        """Time one prompt without a cached prefix, up to its first token."""
        from benchmarks.common.reference import make_inputs
        from benchmarks.common.workload import random_texts

        (ask,) = random_texts(1, self._prompt, 1, TOKENS, seed=9)
        inputs = make_inputs([ask.prepared])
        runs = {"mmengine": lambda: self._ours.answer([ask])}
        if self._reference is not None:
            runs["transformers"] = lambda: self._reference.generate(inputs, 1)
        samples = {side: [] for side in runs}
        # The first run also allocates memory and does not count.
        for number in range(rounds + 1):
            for side, run in runs.items():
                sample = clocked(run)[0]
                if number:
                    samples[side].append(sample)
        table = Table(
            f"Prefill of {self._prompt} tokens, {threads_text(self._reader.threads)}", ("", "ms", "tokens/s")
        )
        for side, taken in samples.items():
            table.rows.append((side, f"{_wall(taken) * 1e3:.0f}", f"{self._prompt / _wall(taken):.0f}"))
        return table


class Reader:
    """Reads as many bytes as the weights have, with torch's threads. A decode step cannot be faster.

    Uses the faster of torch.dot and torch.mv. On one core, torch.dot of a vector with itself was fastest;
    torch's and numpy's sum, torch.mv, and AVX-512 loops in C were 1 to 20 % slower.
    """

    def __init__(self, num_bytes: int) -> None:
        import torch

        self._values = torch.ones(num_bytes // 4)
        self._rows = self._values[: len(self._values) // 4096 * 4096].view(-1, 4096)
        self._ones = torch.ones(4096)
        self.threads = torch.get_num_threads()
        self._torch = torch

    def read(self) -> float:
        """Read the bytes once, and return the seconds."""
        torch = self._torch
        ways = (lambda: torch.dot(self._values, self._values), lambda: torch.mv(self._rows, self._ones))
        return min(clocked(way)[0].wall for way in ways)


def threads_text(threads: int) -> str:
    return "one core" if threads == 1 else f"{threads} cores"


def _decode_table(found: dict[int, Steps], context: int, threads: int, num_bytes: int) -> Table:
    weights = f"{num_bytes / 2e6:.1f} M text weights in bfloat16"
    table = Table(
        f"Decode of {weights}, context {context}, {threads_text(threads)}",
        ("", "wall ms/step", "CPU ms/step", "best ms/step", "tokens/s", "mmengine is faster by",
         "one read of the weights", "share of it"),
    )  # fmt: skip
    for rows, steps in found.items():
        sides = {"mmengine": steps.ours} | {f"transformers, {kind}": s for kind, s in steps.theirs.items()}
        for side, samples in sides.items():
            wall, reading = _wall(samples), median(steps.reads)
            table.rows.append(
                (
                    f"{rows} row{'s' * (rows > 1)}, {side}",
                    f"{wall * 1e3:.1f}",
                    f"{median(each.cpu for each in samples) * 1e3:.1f}",
                    f"{min(each.wall for each in samples) * 1e3:.1f}",
                    f"{rows / wall:.1f}",
                    "" if side == "mmengine" else f"{wall / _wall(steps.ours):.2f}",
                    f"{reading * 1e3:.1f} ms",
                    f"{reading / wall:.0%}",
                )
            )
        table.notes += steps.notes
    table.notes.append(
        f"Medians of steps. Both sides take turns of {BURST} steps; after each pair of turns torch.dot or "
        f"torch.mv, whichever is faster, reads as many bytes as the weights have ({num_bytes / 1e6:.0f} MB). "
        "transformers counts with its fastest cache."
    )
    return table


def _targets(found: dict[int, Steps], threads: int) -> list[Target]:
    cores = f"{threads}_core{'s' * (threads > 1)}"
    targets = [
        Target(f"half_billion_{rows}_rows_{cores}", steps.ratio(), *WANTED[rows])
        for rows, steps in found.items()
        if steps.theirs
    ]
    targets.append(Target(f"half_billion_read_floor_share_{cores}", found[1].floor_share(), FLOOR_SHARE))
    return targets


def _wall(samples: list[Sample]) -> float:
    return median(each.wall for each in samples)


def _equal(mine: list[int], theirs: list[int]) -> bool:
    return list(mine) == list(theirs)


if __name__ == "__main__":
    sys.exit(typer.run(main))
