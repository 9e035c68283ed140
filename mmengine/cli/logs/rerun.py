"""`mmengine log rerun`: estimates the latencies that a log's requests would have under other settings."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmengine.cli.logs.findings import reported
from mmengine.cli.logs.printing import Folder, Json, console, existing, print_json, short

if TYPE_CHECKING:  # Heavy; loaded when a command runs.
    from rich.table import Table

    from mmengine.replay.rerun.rerun import Rerun

HELP = (
    "Estimate a log's latencies under other settings.\n\n"
    "The scheduler is the engine's own, arrivals and answers are the log's, and times come from a cost model "
    "fitted to the log's own steps. The log's own settings are simulated as well; the deviation from the "
    "logged figures is the estimate's error, and is printed beside each number.\n\n"
    "[bold]Examples[/bold]\n\n  mmengine log rerun run.log --set num_blocks=4097 --set policy=priority\n\n"
    "  mmengine log rerun run.log --config other.json --json"
)


def rerun(
    folder: Folder,
    config: Annotated[
        Path | None, typer.Option(help="File with a JSON object of settings to change.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Setting to change; may be repeated.", metavar="NAME=VALUE"),
    ] = None,
    json_output: Json = False,
) -> None:
    from rich.console import Console  # Lazy, like all below: help needs none of them.

    from mmengine.replay.rerun.rerun import read_changes, rerun
    from mmengine.simulation.bounded_files import read_object

    changes = {**(read_object(config) if config is not None else {}), **read_changes(set_ or [])}
    with reported(existing(folder)) as findings:
        with Console(stderr=True).status("reading the log") as status:
            result = rerun(folder, changes, status.update, findings)
        if json_output:
            print_json(_as_json(result))
            return
        out = console()
        out.print(_table(result))
        for line in _words(result):
            out.print(line, markup=False, soft_wrap=True)


def _as_json(result: "Rerun") -> dict[str, Any]:
    from dataclasses import asdict

    from mmengine.replay.rerun.fit import PARTS

    return {
        "changed": {name: {"logged": old, "what_if": new} for name, (old, new) in result.changed.items()},
        "logged": result.logged.numbers,
        "simulated": result.again.numbers,
        "what_if": result.what_if.numbers,
        "error": result.errors,
        "fit": {
            **asdict(result.fit_error),
            "prices_ns": dict(zip(PARTS, result.prices.prices.tolist(), strict=True)),
            "host_ns": dict(zip(("step", "row"), result.prices.host_prices.tolist(), strict=True)),
        },
        "notes": result.notes,
        "simulated_notes": result.again.notes,
        "what_if_notes": result.what_if.notes,
    }


def _table(result: "Rerun") -> "Table":
    from rich.table import Table

    table = Table()
    table.add_column("")
    for title in ("logged", "simulated as logged", "error", "what if", "change"):
        table.add_column(title, justify="right")
    for name, logged in result.logged.numbers.items():
        again, other = result.again.numbers[name], result.what_if.numbers[name]
        error = result.errors[name]
        change = f"{100 * (other / again - 1):+.1f} %" if again else ""
        table.add_row(
            name.replace("_", " "),
            _number(logged),
            _number(again),
            "" if error is None else f"{100 * error:+.1f} %",
            f"{_number(other)}{_margin(error, other)}",
            change,
        )
    return table


def _margin(error: float | None, value: float) -> str:
    """Return " ± " and the error of the estimate in the unit of `value`. Return "" if the error is unknown or
    negligible.
    """
    return "" if error is None or abs(error) < 0.0005 else f" ± {_number(abs(error) * value)}"


def _words(result: "Rerun") -> list[str]:
    from mmengine.replay.rerun.fit import PARTS

    changed = ", ".join(f"{name} {short(old)} -> {short(new)}" for name, (old, new) in result.changed.items())
    fit = result.fit_error
    prices = zip(PARTS, result.prices.prices.tolist(), strict=True)
    return [
        f"changed: {changed or 'nothing'}",
        f"cost model: fitted to {fit.num_steps} steps; its error on held-out steps is "
        f"{100 * fit.median:.1f} % (median), {100 * fit.p90:.1f} % (p90), {100 * fit.total:+.1f} % in sum",
        "prices in ns: " + ", ".join(f"{price:.0f} per {part}" for part, price in prices if price >= 0.5),
        "change: what if relative to simulated as logged; ±: error of simulated as logged",
        *result.notes,
        *(f"simulated as logged: {note}" for note in result.again.notes),
        *(f"what if: {short(note)}" for note in result.what_if.notes),
    ]


def _number(value: float) -> str:
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.2f}" if abs(value) < 1000 else f"{value:,.0f}"
