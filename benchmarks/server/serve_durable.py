"""Measures the cost of durability: a server with a log and a response store against a plain server.

    python -m benchmarks serve_durable # all parts into benchmarks/results/serve_durable.md, seventeen minutes
    python -m benchmarks serve_durable --quick --part costs # one part, half a minute

The two servers take turns (sides.py). Each figure is the median difference over all rounds. ± is half the
width of the median's confidence interval (level: about two thirds).
"""

import enum
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.common.measure import THREAD_VARIABLES
from benchmarks.common.report import Part, Table, Target, machine_lines, markdown, show, target_table
from benchmarks.server.sides import PAUSE_S, STREAMS, compared, error_of, num_prompts, turns

if TYPE_CHECKING:  # Imported late, after the number of threads is set.
    from benchmarks.server.processes import Running

TITLE = "A server that can be killed, on a CPU"
WANTED_LOSS, WANTED_FIRST_MS, WANTED_US = 0.02, 1.0, 60
# Kind of call -> whether the call goes to /v1/responses.
KINDS = {"chat": False, "responses, stored": True}
SIDES = ("without a log", "with log and store")
RESULTS = Path(__file__).parents[1] / "results" / "serve_durable.md"


class Which(enum.StrEnum):
    STREAMS = "streams"  # Tokens per second.
    FIRST = "first"  # Time to first token.
    COSTS = "costs"  # CPU time per request.


def main(
    part: Annotated[list[Which] | None, typer.Option(help="Parts to run (default: all).")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Markdown file for the tables (default for a full run: a file in results/)."),
    ] = None,
) -> None:
    """Measure on this machine, with one torch thread for each process."""
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
    from benchmarks.common.half_billion_model import cached_folder
    from benchmarks.server.processes import serving

    found = Part()
    for name, model in (("0.4 B, bfloat16", cached_folder()), ("included checkpoint", None)):
        with serving(model) as plain, serving(model, folder / name) as kept:
            servers = dict(zip(SIDES, (plain, kept), strict=True))
            if Which.STREAMS in parts:
                tokens, rounds = (40, 12) if model else (100, 20)
                found.add(_rates(name, servers, tokens, 2 if quick else rounds, model is not None))
            if Which.FIRST in parts:
                found.add(_first(name, servers, 5 if quick else 60))
    return found


def _rates(name: str, servers: dict[str, "Running"], tokens: int, rounds: int, is_wanted: bool) -> Part:
    rates = Table(
        f"{STREAMS} streams of {tokens} tokens, {name}: tokens per second", ("", *SIDES, "lost", "±")
    )
    costs = Table(
        f"CPU time of the server in µs per token, the same streams, {name}", ("", *SIDES, "more", "±")
    )
    targets, start = [], 0
    for kind, is_response in KINDS.items():
        found = compared(servers, rounds, tokens, start, is_response)
        start += num_prompts(rounds)
        rates.rows.append(found.rates_row(kind))
        costs.rows.append(found.costs_row(kind))
        if is_wanted:
            what = f"share of tokens lost, {kind}, {name}"
            targets.append(Target(what, median(found.lost()), WANTED_LOSS, most=True))
    return Part([rates, costs], targets)


def _first(name: str, servers: dict[str, "Running"], rounds: int) -> Part:
    from benchmarks.server.clients import Load, load

    table = Table(f"Time to first token, one stream, {name}: milliseconds", ("", *SIDES, "more", "±"))
    targets = []
    for kind, is_response in KINDS.items():
        times: dict[str, list[float]] = {side: [0.0] * rounds for side in SIDES}
        for number, side in turns(rounds, SIDES):
            time.sleep(PAUSE_S)
            more = (("ignore_eos", True),)
            asked = Load(1, 1, 1, True, more, start=10**6 + number, is_response=is_response)
            (answer,) = load(servers[side].port, asked)
            first_at = answer.first_at or time.perf_counter()  # first_at is 0 if no event had text.
            if number >= 0:
                # Each server has two turns per round; store the mean.
                times[side][number] += 1e3 * (first_at - answer.sent_at) / 2
        later = [kept - plain for plain, kept in zip(*(times[side] for side in SIDES), strict=True)]
        figures = (f"{median(times[side]):.2f}" for side in SIDES)
        table.rows.append((kind, *figures, f"{median(later):.2f}", f"{error_of(later):.2f}"))
        targets.append(
            Target(
                f"additional ms to the first token, {kind}, {name}", median(later), WANTED_FIRST_MS, most=True
            )
        )
    return Part([table], targets)


def _costs(log: Path, quick: bool) -> Part:
    """Measure the CPU costs per request."""
    from benchmarks.server.durable_costs import AT_ONCE, ENVELOPES, STORED, kept_costs

    rounds, requests = (4, 128) if quick else (200, 128)
    found = kept_costs(log, rounds, requests)
    table = Table("CPU time per request with one output token, included checkpoint, µs", ("", "median"))
    table.rows = [(name, f"{median(each):.0f}") for name, each in found.items()]
    more = Table("Additional CPU time per request, µs", ("", "median", "±"))
    targets = []
    for name, (side, than) in {**ENVELOPES, **STORED}.items():
        each = [one - other for one, other in zip(found[side], found[than], strict=True)]
        more.rows.append((name, f"{median(each):.0f}", f"{error_of(each):.0f}"))
        if name in STORED:
            targets.append(
                Target(f"additional CPU time per request in µs, {name}", median(each), WANTED_US, most=True)
            )
    more.notes.append(
        f"CPU time of all threads of the serving process, including writes. In each of {rounds} rounds, "
        f"every variant serves {requests} requests twice, {AT_ONCE} at once. An envelope is the caller's "
        "data; without envelopes the log holds only the engine's events."
    )
    return Part([table, more], targets)


if __name__ == "__main__":
    typer.run(main)
