"""`mmengine log rerun`: predicts a log's latencies under other settings."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from mmengine.cli.logs.findings import reported
from mmengine.cli.logs.printing import Folder, Json, console, existing, print_json, printable, short

if TYPE_CHECKING:  # Heavy; loaded when a command runs.
    from rich.table import Table

    from mmengine.replay.rerun.calibration import Calibration
    from mmengine.replay.rerun.rerun import Rerun

HELP = (
    "Tell a log's latencies under other settings, or that they cannot be predicted.\n\n"
    "If the settings lead to the log's own decisions, the steps are the log's. Otherwise its requests are "
    "served again by the engine's own scheduler, with step times fitted to the log. Such an answer is an "
    "interval. It is given only if the model predicts halves of the log that it did not see: p50 and p99 of "
    "the latencies within 10 % and 20 %, or within 1.5 times the difference between the logged halves.\n\n"
    "Exit code 6 if the log cannot answer; the reason is printed.\n\n"
    "[bold]Examples[/bold]\n\n  mmengine log rerun run.log\n\n"
    "  mmengine log rerun run.log --set num_blocks=4097 --set policy=priority\n\n"
    "  mmengine log rerun run.log --config other.json --json"
)
NO_ANSWER = 6  # Exit code if the log does not allow a prediction.


def rerun(
    folder: Folder,
    config: Annotated[
        Path | None, typer.Option(help="File with a JSON object of settings to change.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Setting to change; may be repeated.", metavar="NAME=VALUE"),
    ] = None,
    exact: Annotated[
        bool | None,
        typer.Option(
            "--exact/--simulate",
            help="Answer only if the settings lead to the log's own decisions; or simulate the decisions in "
            "any case. Default: simulate if the decisions differ.",
            show_default=False,
        ),
    ] = None,
    json_output: Json = False,
) -> None:
    from rich.console import Console  # Lazy, like the imports below, to make --help fast.

    from mmengine.replay.rerun.rerun import NoPrediction, read_changes, rerun
    from mmengine.simulation.bounded_files import read_object

    changes = {**(read_object(config) if config is not None else {}), **read_changes(set_ or [])}
    with reported(existing(folder)) as findings:
        try:
            with Console(stderr=True).status("reading the log") as status:
                result = rerun(folder, changes, status.update, findings, exact)
        except NoPrediction as error:
            _refuse(str(error))
        if json_output:
            print_json(_as_json(result))
        else:
            _print(result)
        if result.refusal:
            _refuse(result.refusal)


def _refuse(why: str) -> NoReturn:
    sys.stdout.flush()
    print(f"mmengine: this log cannot answer: {printable(why, 1000)}", file=sys.stderr)
    raise typer.Exit(NO_ANSWER)


def _print(result: "Rerun") -> None:
    out = console()
    out.print(_table(result))
    if result.calibration.rows:
        out.print(_calibration(result.calibration))
    for line in _words(result):
        out.print(line, markup=False, soft_wrap=True)


def _as_json(result: "Rerun") -> dict[str, object]:
    from dataclasses import asdict

    from mmengine.replay.rerun.fit import PARTS

    return {
        "changed": {name: {"logged": old, "what_if": new} for name, (old, new) in result.changed.items()},
        "exact": result.is_exact,
        "refusal": result.refusal,
        "logged": result.logged.numbers,
        "simulated": result.again.numbers,
        "what_if": None if result.what_if is None else result.what_if.numbers,
        "intervals": result.intervals,
        "error": result.errors,
        "calibration": [
            {**asdict(row), "error": row.error, "bound": row.bound} for row in result.calibration.rows
        ],
        "fit": {
            **asdict(result.fit_error),
            "prices_ns": dict(zip(PARTS, result.prices.prices.tolist(), strict=True)),
            "host_ns": dict(zip(("step", "row"), result.prices.host_prices.tolist(), strict=True)),
        },
        "notes": result.notes,
        "simulated_notes": result.again.notes,
        "what_if_notes": [] if result.what_if is None else result.what_if.notes,
    }


def _table(result: "Rerun") -> "Table":
    from rich.table import Table

    table = Table()
    table.add_column("")
    own = "with modelled step times" if result.is_exact else "simulated as logged"
    titles = ["logged", own, "error", *([] if result.what_if is None else ["what if"])]
    for title in titles:
        table.add_column(title, justify="right")
    for name, logged in result.logged.numbers.items():
        error = result.errors[name]
        cells = [_number(logged), _number(result.again.numbers[name])]
        cells.append("" if error is None else f"{100 * error:+.1f} %")
        if result.what_if is not None:
            cells.append(_interval(result, name, logged))
        table.add_row(name.replace("_", " "), *cells)
    return table


def _interval(result: "Rerun", name: str, logged: float) -> str:
    """Return a predicted figure as text: an interval, or the logged value if the prediction has the same
    decisions as the log.
    """
    if result.is_exact:
        return _number(logged)
    low, high = map(_number, result.intervals[name])
    return low if low == high else f"{low} to {high}"


def _calibration(calibration: "Calibration") -> "Table":
    from rich.table import Table

    table = Table(title="halves of the log, each predicted from the other", title_justify="left")
    table.add_column("half")
    table.add_column("")
    for title in ("logged", "predicted", "error", "bound", "halves differ"):
        table.add_column(title, justify="right")
    for row in calibration.rows:
        shares = [f"{100 * row.error:+.1f} %", f"{100 * row.bound:.1f} %", f"{100 * row.difference:.1f} %"]
        numbers = _number(row.logged), _number(row.simulated)
        table.add_row(row.half, row.name.replace("_", " "), *numbers, *shares)
    return table


def _words(result: "Rerun") -> list[str]:
    from mmengine.replay.rerun.fit import PARTS

    changed = ", ".join(f"{name} {short(old)} -> {short(new)}" for name, (old, new) in result.changed.items())
    fit = result.fit_error
    prices = zip(PARTS, result.prices.prices.tolist(), strict=True)
    how = "the decisions are the log's" if result.is_exact else "the decisions are simulated"
    return [
        f"changed: {changed or 'nothing'}; {how}",
        f"cost model: fitted to {fit.num_steps} steps; its error on held-out steps is "
        f"{100 * fit.median:.1f} % (median), {100 * fit.p90:.1f} % (p90), {100 * fit.total:+.1f} % in sum",
        "prices in ns: " + ", ".join(f"{price:.0f} per {part}" for part, price in prices if price >= 0.5),
        *result.notes,
        *(f"simulated as logged: {note}" for note in result.again.notes),
        *(f"what if: {short(note)}" for note in ([] if result.what_if is None else result.what_if.notes)),
    ]


def _number(value: float) -> str:
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.2f}" if abs(value) < 1000 else f"{value:,.0f}"
