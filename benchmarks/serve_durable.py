"""What it costs that a server can be killed: log, envelope and store, beside a server that keeps nothing.

python benchmarks/serve_durable.py --out benchmarks/results/serve_durable.md    # all of it, some ten minutes
python benchmarks/serve_durable.py --quick --part costs                         # one part, half a minute

What is compared runs in turns, in an order drawn anew each time, and is told as the median of differences
between neighbours: a machine with other work is as slow for both.
"""

import enum
import os
import random
import tempfile
import time
from pathlib import Path
from statistics import median, stdev
from typing import Annotated

import typer
from measure import THREAD_VARIABLES
from report import Part, Table, Target, machine_lines, markdown, show, target_table

TITLE = "A server that can be killed, on a CPU"
WANTED_LOSS, WANTED_FIRST_MS, WANTED_US = 0.02, 1.0, 60
STREAMS = 16
KINDS = {"chat": False, "responses, stored": True}  # whether it is of /v1/responses
SIDES = ("without a log", "with log and store")


class Which(enum.StrEnum):
    STREAMS = "streams"  # tokens a second
    FIRST = "first"  # time to first token
    COSTS = "costs"  # CPU of a request


def main(
    part: Annotated[list[Which] | None, typer.Option(help="Only these parts.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the tables here, as markdown.")] = None,
) -> None:
    """Measure on this machine, one thread of torch for everybody."""
    for variable in THREAD_VARIABLES:
        os.environ[variable] = "1"
    found, parts = Part(), part or list(Which)
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
    from serve_processes import ours

    found = Part()
    for name, model in (("0.4 B, bfloat16", cached_folder()), ("embedded", None)):
        with ours(model) as plain, ours(model, folder / name) as kept:
            ports = dict(zip(SIDES, (plain, kept), strict=True))
            if Which.STREAMS in parts:
                tokens, rounds = (40, 12) if model else (100, 20)
                found.add(_rates(name, ports, tokens, 2 if quick else rounds, model is not None))
            if Which.FIRST in parts:
                found.add(_first(name, ports, 5 if quick else 40))
    return found


def _rates(name: str, ports: dict[str, int], tokens: int, rounds: int, is_wanted: bool) -> Part:
    from serve_clients import Load, load

    table = Table(f"{STREAMS} streams of {tokens} tokens, {name}: tokens a second", ("", *SIDES, "lost", "±"))
    targets, chance, start = [], random.Random(19), 0
    for kind, is_response in KINDS.items():
        rates: dict[str, list[float]] = {side: [] for side in SIDES}
        for place in range(rounds + 1):
            for side in chance.sample(SIDES, 2):
                start += STREAMS
                more = (("ignore_eos", True),)
                asked = Load(STREAMS, STREAMS, tokens, True, more, start=start, is_response=is_response)
                begun = time.perf_counter()
                load(ports[side], asked)
                if place:  # the first one warms up
                    rates[side].append(STREAMS * tokens / (time.perf_counter() - begun))
        lost = [1 - kept / plain for plain, kept in zip(*(rates[side] for side in SIDES), strict=True)]
        figures = (f"{median(rates[side]):.1f}" for side in SIDES)
        table.rows.append((kind, *figures, f"{100 * median(lost):.1f} %", f"{100 * error_of(lost):.1f} %"))
        if is_wanted:
            what = f"share of tokens lost, {kind}, {name}"
            targets.append(Target(what, median(lost), WANTED_LOSS, most=True))
    return Part([table], targets)


def _first(name: str, ports: dict[str, int], requests: int) -> Part:
    from serve_clients import Load, load

    table = Table(
        f"Streams of one token, one after the other, {name}: milliseconds", ("", *SIDES, "more", "±")
    )
    targets, chance = [], random.Random(19)
    for kind, is_response in KINDS.items():
        times: dict[str, list[float]] = {side: [] for side in SIDES}
        for number in range(-2, requests):
            for side in chance.sample(SIDES, 2):
                start = 10**6 + number
                more = (("ignore_eos", True),)
                asked = Load(1, 1, 1, True, more, start=start, is_response=is_response)
                (answer,) = load(ports[side], asked)
                ended_at = time.perf_counter()
                if number >= 0:  # those before warm up
                    times[side].append(1e3 * (ended_at - answer.sent_at))
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

    rounds, requests = (4, 160) if quick else (40, 240)
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
        f"All threads of the process that serves, its writes included; {rounds} rounds of {requests} "
        f"requests a side, {AT_ONCE} at once. Without one the log has what it had before there were any."
    )
    return Part([table, more], targets)


def error_of(values: list[float]) -> float:
    """Of their median, if they are drawn like a bell."""
    return 1.25 * stdev(values) / len(values) ** 0.5


if __name__ == "__main__":
    typer.run(main)
