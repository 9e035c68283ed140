"""`mmengine log diff`: finds the first difference between two logs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mmengine.cli.logs.findings import reported
from mmengine.cli.logs.printing import Json, clean, console, existing, print_json, short
from mmengine.cli.logs.verify import DIVERGED, SAME

if TYPE_CHECKING:  # Heavy; loaded when a command runs.
    from mmengine.replay.diff import LogDifference, Side

HELP = (
    "Find the first step in which two logs differ, in their inputs or in their decisions.\n\n"
    "Row numbers, block numbers and times are not compared. Exit code: 0 for equal logs, 3 for different "
    "logs.\n\n"
    "[bold]Examples[/bold]\n\n  mmengine log diff before.log after.log\n\n"
    "  mmengine log diff run.log public.log --match arrival --shapes"
)
Log = Annotated[Path, typer.Argument(metavar="LOG", help="A log.", show_default=False)]


def diff(
    first: Log,
    second: Log,
    match: Annotated[
        Literal["id", "arrival"], typer.Option(help="Match requests by id, or by order of arrival.")
    ] = "id",
    shapes: Annotated[
        bool, typer.Option("--shapes", help="Compare only the number of tokens, media and texts.")
    ] = False,
    json_output: Json = False,
) -> None:
    import msgspec  # Imported late, like the next module, because --help needs neither.

    from mmengine.replay.diff import diff as compare

    with reported(existing(first)) as one, reported(existing(second)) as two:
        found = compare(first, second, match, shapes=shapes, findings=(one, two))
        if json_output:
            print_json({"same": not found.kind, **msgspec.to_builtins(found)})
        else:
            _print(found, first, second, match)
        raise typer.Exit(DIVERGED if found.kind or one.last or two.last else SAME)


def _print(found: "LogDifference", first: Path, second: Path, match: str) -> None:
    from rich.table import Table

    out = console()
    if found.settings:
        table = Table("setting", clean(str(first)), clean(str(second)))
        for name, (one, two) in found.settings.items():
            table.add_row(clean(name), clean(short(one, 80)), clean(short(two, 80)))
        out.print(table)
    if not found.kind or found.sides is None:
        out.print(f"equal: {found.events} events up to step {found.last_common_step}")
        return
    of = f" of {found.request}" if found.request and found.field != "request_id" else ""
    how = {
        "inputs": f"different inputs: {found.field}{of}",
        "decisions": f"different decisions: {found.field}{of}",
        "end": "one log ends, the other continues",
    }[found.kind]
    out.print(f"{found.events} events are equal; then {how}", markup=False, soft_wrap=True)
    table = Table("", clean(str(first)), clean(str(second)))
    one, two = found.sides
    table.add_row("record", *(f"{side.sequence} {side.event}" if side.event else "" for side in (one, two)))
    table.add_row("step", *(str(side.step) if side.event else "" for side in (one, two)))
    values = _values(one, two) if found.field != "event" else (_describe(one), _describe(two))
    table.add_row(clean(found.field + of), *(clean(text) for text in values))
    for name in ("running", "waiting", "free_blocks"):
        figures = (str(getattr(side, name)) if side.event else "" for side in (one, two))
        table.add_row(name.replace("_", " "), *figures)
    out.print(table)
    if found.field == "request_id" and match == "id":
        out.print("to match requests with different ids, use --match arrival")


def _values(one: "Side", two: "Side") -> tuple[str, str]:
    """Return both values as texts. The texts of long lists begin at the first difference."""
    left, right = one.value, two.value
    if isinstance(left, dict) and isinstance(right, dict):
        names = [name for name in {**left, **right} if left.get(name) != right.get(name)]
        left, right = ({name: side[name] for name in names if name in side} for side in (left, right))
    if isinstance(left, list) and isinstance(right, list):
        pairs = zip(left, right, strict=False)
        place = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))
        if place > 4:
            return _from(left, place), _from(right, place)
    return _shown(left), _shown(right)


def _describe(side: "Side") -> str:
    """Describe an event that the other log does not have at this position."""
    if side.event in ("Executed", "Dispatched", "Failed", ""):
        return {
            "Executed": "the step ran",
            "Dispatched": "the step is complete",
            "Failed": "the step failed",
        }.get(side.event, "the log ends")
    facts = {
        name: value for name, value in side.value.items() if value not in (0, "", [], {}, False, -1, None)
    }
    return ", ".join(f"{name} {_shown(value)}" for name, value in facts.items() if name != "step")


def _from(values: list[Any], place: int) -> str:
    return f"from {place} of {len(values)}: {short(values[place : place + 8], 200)}"


def _shown(value: Any) -> str:
    return "" if value is None else short(value, 200)
