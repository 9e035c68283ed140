"""What it costs that a server can be killed: log, envelope and store, beside a server that keeps nothing.

python benchmarks/serve_durable.py    # all of it into benchmarks/results/serve_durable.md, seventeen minutes
python benchmarks/serve_durable.py --quick --part costs    # one part, half a minute

What is compared runs in turns: in an order drawn anew each round and then the same order backwards, so that a
machine that gets slower meanwhile is as much slower for each. Told is the median of the rounds' differences,
and with ± half of the interval in which it lies in two of three times, however they are spread.
"""

import enum
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from math import ceil
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer
from measure import THREAD_VARIABLES
from report import Part, Table, Target, machine_lines, markdown, show, target_table

if TYPE_CHECKING:  # what the engine needs is loaded when the threads are set
    from serve_processes import Running

TITLE = "A server that can be killed, on a CPU"
WANTED_LOSS, WANTED_FIRST_MS, WANTED_US = 0.02, 1.0, 60
STREAMS = 16
KINDS = {"chat": False, "responses, stored": True}  # whether it is of /v1/responses
SIDES = ("without a log", "with log and store")
PAUSE_S = 0.03  # before a stream that is timed: what the answer before left is in the log by then
RESULTS = Path(__file__).parent / "results" / "serve_durable.md"


class Which(enum.StrEnum):
    STREAMS = "streams"  # tokens a second
    FIRST = "first"  # time to first token
    COSTS = "costs"  # CPU of a request


def main(
    part: Annotated[list[Which] | None, typer.Option(help="Only these parts.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write the tables here, as markdown; of all parts into results/.")
    ] = None,
) -> None:
    """Measure on this machine, one thread of torch for everybody."""
    for variable in THREAD_VARIABLES:
        os.environ[variable] = "1"
    found, parts = Part(), part or list(Which)
    if out is None and not part and not quick:
        out = RESULTS
    with tempfile.TemporaryDirectory() as folder:
        if Which.STREAMS in parts or Which.FIRST in parts:
            found.add(_served(Path(folder), parts, quick))
        if Which.COSTS in parts:
            found.add(_costs(Path(folder) / "costs", quick))
    tables, lines = [*found.tables, target_table(found.targets)], machine_lines(1)
    show(tables, lines)
    if out is not None:
        out.write_text(markdown(TITLE, tables, lines), encoding="utf-8")


def _served(folder: Path, parts: list[Which], quick: bool) -> Part:
    from half_billion_model import cached_folder
    from serve_processes import serving

    found = Part()
    for name, model in (("0.4 B, bfloat16", cached_folder()), ("embedded", None)):
        with serving(model) as plain, serving(model, folder / name) as kept:
            servers = dict(zip(SIDES, (plain, kept), strict=True))
            if Which.STREAMS in parts:
                tokens, rounds = (40, 12) if model else (100, 20)
                found.add(_rates(name, servers, tokens, 2 if quick else rounds, model is not None))
            if Which.FIRST in parts:
                found.add(_first(name, servers, 5 if quick else 60))
    return found


def turns(rounds: int, sides: Sequence[str] = SIDES) -> Iterator[tuple[int, str]]:
    """Numbers of rounds, of which those below 0 warm up, and whose turn it is."""
    chance = random.Random(19)
    for number in range(-1, rounds):
        order = chance.sample(sides, len(sides))
        yield from ((number, side) for side in (*order, *reversed(order)))


def _rates(name: str, servers: dict[str, "Running"], tokens: int, rounds: int, is_wanted: bool) -> Part:
    from serve_clients import Load, load

    rates = Table(f"{STREAMS} streams of {tokens} tokens, {name}: tokens a second", ("", *SIDES, "lost", "±"))
    costs = Table(f"The same, CPU of the server: microseconds a token, {name}", ("", *SIDES, "more", "±"))
    targets, start = [], 0
    for kind, is_response in KINDS.items():
        took = {side: [[0.0, 0.0] for _ in range(rounds)] for side in SIDES}  # seconds, and those of CPU
        for number, side in turns(rounds):
            start += STREAMS
            more = (("ignore_eos", True),)
            asked = Load(STREAMS, STREAMS, tokens, True, more, start=start, is_response=is_response)
            cpu, begun = servers[side].cpu_s, time.perf_counter()
            load(servers[side].port, asked)
            seconds = time.perf_counter() - begun
            time.sleep(PAUSE_S)
            if number >= 0:
                took[side][number][0] += seconds
                took[side][number][1] += servers[side].cpu_s - cpu
        count = 2 * STREAMS * tokens  # of a round
        plain, kept = (took[side] for side in SIDES)
        lost = [1 - mine[0] / theirs[0] for mine, theirs in zip(plain, kept, strict=True)]
        figures = (f"{count / median(each[0] for each in took[side]):.1f}" for side in SIDES)
        rates.rows.append((kind, *figures, f"{100 * median(lost):.1f} %", f"{100 * error_of(lost):.1f} %"))
        grown = [theirs[1] / mine[1] - 1 for mine, theirs in zip(plain, kept, strict=True)]
        figures = (f"{1e6 * median(each[1] for each in took[side]) / count:.0f}" for side in SIDES)
        costs.rows.append((kind, *figures, f"{100 * median(grown):.1f} %", f"{100 * error_of(grown):.1f} %"))
        if is_wanted:
            what = f"share of tokens lost, {kind}, {name}"
            targets.append(Target(what, median(lost), WANTED_LOSS, most=True))
    return Part([rates, costs], targets)


def _first(name: str, servers: dict[str, "Running"], rounds: int) -> Part:
    from serve_clients import Load, load

    table = Table(f"Time to first token, one stream, {name}: milliseconds", ("", *SIDES, "more", "±"))
    targets = []
    for kind, is_response in KINDS.items():
        times: dict[str, list[float]] = {side: [0.0] * rounds for side in SIDES}
        for number, side in turns(rounds):
            time.sleep(PAUSE_S)
            more = (("ignore_eos", True),)
            asked = Load(1, 1, 1, True, more, start=10**6 + number, is_response=is_response)
            (answer,) = load(servers[side].port, asked)
            first_at = answer.first_at or time.perf_counter()  # the token may have no text of its own
            if number >= 0:
                times[side][number] += 1e3 * (first_at - answer.sent_at) / 2  # of its two turns
        later = [kept - plain for plain, kept in zip(*(times[side] for side in SIDES), strict=True)]
        figures = (f"{median(times[side]):.2f}" for side in SIDES)
        table.rows.append((kind, *figures, f"{median(later):.2f}", f"{error_of(later):.2f}"))
        targets.append(
            Target(f"ms to the first token more, {kind}, {name}", median(later), WANTED_FIRST_MS, most=True)
        )
    return Part([table], targets)


def _costs(log: Path, quick: bool) -> Part:
    """Alone in a process: nothing else's memory."""
    from serve_durable_costs import AT_ONCE, ENVELOPES, STORED, kept_costs

    rounds, requests = (4, 128) if quick else (200, 128)
    found = kept_costs(log, rounds, requests)
    table = Table("A request of one token, embedded: CPU microseconds", ("", "median"))
    table.rows = [(name, f"{median(each):.0f}") for name, each in found.items()]
    more = Table("What a request costs more, CPU microseconds", ("", "median", "±"))
    targets = []
    for name, (side, than) in {**ENVELOPES, **STORED}.items():
        each = [one - other for one, other in zip(found[side], found[than], strict=True)]
        more.rows.append((name, f"{median(each):.0f}", f"{error_of(each):.0f}"))
        if name in STORED:
            targets.append(Target(f"CPU us a request, {name}", median(each), WANTED_US, most=True))
    more.notes.append(
        f"All threads of the process that serves, its writes included; {rounds} rounds of twice {requests} "
        f"requests a side, {AT_ONCE} at once. Without one the log has what it had before there were any."
    )
    return Part([table, more], targets)


def error_of(values: list[float]) -> float:
    """Of their median: half of what lies between the values that enclose it in two of three times."""
    found, reach = sorted(values), len(values) ** 0.5 / 2
    least, most = max(0.0, len(found) / 2 - reach), min(len(found) - 1.0, len(found) / 2 + reach)
    return (found[ceil(most)] - found[int(least)]) / 2


if __name__ == "__main__":
    typer.run(main)
