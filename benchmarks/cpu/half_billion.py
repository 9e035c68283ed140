"""Half a billion weights in bfloat16 beside transformers, at one number of threads, in a process of its own.

python -m benchmarks half_billion --threads 1           # what throughput.py runs for one core and for two

Both sides decode the same prompts in one process and take turns every few steps: while transformers'
`generate` stands still, our engine makes steps, and the memory is read once as fast as it can be.
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
BURST = 6  # steps of one side before the other's turn; the first of a turn does not count
WANTED = {1: (1.6, 1.8), 16: (1.7, 2.0)}  # by rows: how many times faster, and the stretch
FLOOR_SHARE = 0.8
PROMPT = 512  # tokens of the prefill
TOKENS = 1500  # ids of prompts lie below: none of them is a special one
SALT = "decode"  # one for all runs: prompts are computed once, for only decoding counts
GROWING, STATIC, COMPILED = "growing cache", "static cache", "static cache, compiled"


def main(
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch, and CPUs, for both.")] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer steps, and a growing cache only.")] = False,
    compiled: Annotated[
        bool, typer.Option(help="Try torch.compile on transformers' model, too (a minute).")
    ] = True,
    folder: Annotated[Path | None, typer.Option(help="Another model than the one made for this.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="All of it as one line of JSON.")] = False,
) -> None:
    """Decode and prefill of both sides on the same random weights."""
    use_threads(threads)
    part = measure(threads, quick, compiled and not quick, folder)
    if json_output:
        print(part.dumps())
    else:
        show(part.tables, machine_lines(threads))


@dataclass(slots=True)
class Steps:
    """What decode steps of one batch size took. `theirs` by the kind of transformers' cache."""

    ours: list[Sample] = field(default_factory=list)
    theirs: dict[str, list[Sample]] = field(default_factory=dict)
    reads: list[float] = field(default_factory=list)  # seconds of reading the weights' bytes once
    notes: list[str] = field(default_factory=list)

    def best(self) -> str:
        """The kind of cache that transformers was fastest with."""
        return min(self.theirs, key=lambda kind: _wall(self.theirs[kind]))

    def ratio(self) -> float:
        return _wall(self.theirs[self.best()]) / _wall(self.ours)

    def floor_share(self) -> float:
        return median(self.reads) / _wall(self.ours)


def measure(threads: int, quick: bool, compiled: bool, folder: Path | None) -> Part:
    import torch  # after the environment is set

    from benchmarks.common.engine_runner import Ours
    from benchmarks.common.half_billion_model import cached_folder, text_bytes
    from benchmarks.common.reference import Reference
    from mmengine.config import EngineConfig

    torch.set_num_threads(threads)
    folder = folder or cached_folder()
    config = EngineConfig(max_model_len=1024, max_num_seqs=max(WANTED), num_blocks=max(WANTED) * 32)
    ours = Ours(model=folder, dtype="bfloat16", config=config)
    pair = Pair(ours, Reference(folder, torch.bfloat16), Reader(text_bytes(folder)))
    num_steps = 3 * BURST if quick else 6 * BURST
    found = {}
    for rows in WANTED:
        kinds = [GROWING] if quick else [GROWING, STATIC]
        if compiled and rows == 1:  # at 16 rows it brought nothing, and costs another minute
            kinds.append(COMPILED)
        found[rows] = pair.decode(rows, num_steps, kinds)
    tables = [_decode_table(found, threads, text_bytes(folder)), pair.prefill(2 if quick else 4)]
    ours.close()
    return Part(tables, _targets(found, threads))


class Pair:
    """The two sides and the reader, in turn."""

    def __init__(self, ours, reference, reader: "Reader") -> None:
        self._ours, self._reference, self._reader = ours, reference, reader

    def decode(self, rows: int, num_steps: int, kinds: list[str]) -> Steps:
        from benchmarks.common.reference import make_inputs, partings
        from benchmarks.common.workload import random_texts
        from benchmarks.cpu.share import clocked_steps, share

        num_new = num_steps + max(WANTED)  # rows that were first are some tokens ahead of the last
        asks = random_texts(rows, CONTEXT - num_steps // 2, num_new, TOKENS)
        inputs = make_inputs([ask.prepared for ask in asks])
        steps, wanted, got = Steps(), [], []
        for kind in kinds:
            answers, theirs = self._in_turn(asks, inputs, num_steps, kind, steps)
            got, wanted = got or answers, wanted or theirs
        singles = [make_inputs([ask.prepared]) for ask in asks]
        got = [answer[: num_steps + 1] for answer in got]
        steps.notes = partings(self._reference, ["text"] * rows, singles, got, wanted, most=3)
        distinct = sorted(len(set(answer)) for answer in wanted)[rows // 2]
        steps.notes.append(
            f"{rows} row(s): {sum(map(_equal, got, wanted))} of {rows} answers are equal; an answer of "
            f"{num_steps + 1} tokens has {distinct} different ones."
        )
        rest = share(clocked_steps(self._ours, asks, num_steps, SALT))
        steps.notes.append(f"{rows} row(s): everything but the model's forward is {rest:.1%} of a step.")
        return steps

    def _in_turn(self, asks, inputs, num_steps: int, kind: str, steps: Steps):
        """Answers of both sides; what their steps took goes to `steps`."""
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
        """One prompt, to its first token, cold."""
        from benchmarks.common.reference import make_inputs
        from benchmarks.common.workload import random_texts

        (ask,) = random_texts(1, PROMPT, 1, TOKENS, seed=9)
        inputs = make_inputs([ask.prepared])
        samples = {"mmengine": [], "transformers": []}
        self._ours.answer([ask])  # a first run of so many tokens at once asks the system for memory
        self._reference.generate(inputs, 1)
        for _ in range(rounds):
            samples["mmengine"].append(clocked(lambda: self._ours.answer([ask]))[0])
            samples["transformers"].append(clocked(lambda: self._reference.generate(inputs, 1))[0])
        table = Table(
            f"Prefill of {PROMPT} tokens, {threads_text(self._reader.threads)}", ("", "ms", "tokens/s")
        )
        for side, taken in samples.items():
            table.rows.append((side, f"{_wall(taken) * 1e3:.0f}", f"{PROMPT / _wall(taken):.0f}"))
        return table


class Reader:
    """Reads as many bytes as the weights have, with torch's threads: no decode step can be faster.

    torch.dot of a vector with itself was the fastest reader of those tried on one core (its sum, numpy's,
    torch.mv and AVX-512 loops in C of one to eight streams were 1 to 20 % slower); of it and torch.mv the
    faster one counts.
    """

    def __init__(self, num_bytes: int) -> None:
        import torch

        self._values = torch.ones(num_bytes // 4)
        self._rows = self._values[: len(self._values) // 4096 * 4096].view(-1, 4096)
        self._ones = torch.ones(4096)
        self.threads = torch.get_num_threads()
        self._torch = torch

    def read(self) -> float:
        """Seconds."""
        torch = self._torch
        ways = (lambda: torch.dot(self._values, self._values), lambda: torch.mv(self._rows, self._ones))
        return min(clocked(way)[0].wall for way in ways)


def threads_text(threads: int) -> str:
    return "one core" if threads == 1 else f"{threads} cores"


def _decode_table(found: dict[int, Steps], threads: int, num_bytes: int) -> Table:
    weights = f"{num_bytes / 2e6:.1f} M text weights in bfloat16"
    table = Table(
        f"Decode of {weights}, context {CONTEXT}, {threads_text(threads)}",
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
        f"Medians of steps; both sides take turns of {BURST} steps, and after each pair of turns as many "
        f"bytes as the weights have ({num_bytes / 1e6:.0f} MB) are read once by torch.dot or torch.mv, "
        "whichever is faster. transformers counts with the cache that it was fastest with."
    )
    return table


def _targets(found: dict[int, Steps], threads: int) -> list[Target]:
    cores = f"{threads}_core{'s' * (threads > 1)}"
    targets = [
        Target(f"half_billion_{rows}_rows_{cores}", s.ratio(), *WANTED[rows]) for rows, s in found.items()
    ]
    targets.append(Target(f"half_billion_read_floor_share_{cores}", found[1].floor_share(), FLOOR_SHARE))
    return targets


def _wall(samples: list[Sample]) -> float:
    return median(each.wall for each in samples)


def _equal(mine: list[int], theirs: list[int]) -> bool:
    return list(mine) == list(theirs)


if __name__ == "__main__":
    sys.exit(typer.run(main))
