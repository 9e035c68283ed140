"""`mmengine log show`: lists requests or steps, or shows a request's events, a step, or a state."""

import sys
from collections import deque
from collections.abc import Callable, Iterable
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from mmengine.cli.logs import fleet
from mmengine.cli.logs.findings import reported
from mmengine.cli.logs.printing import Folder, Json, console, existing, print_json, printable
from mmengine.errors import NO_END, InvalidRequest

if TYPE_CHECKING:  # Heavy; loaded when a command runs.
    from mmengine.replay.checked_log import CheckedLog
    from mmengine.replay.findings import Findings
    from mmengine.replay.queries.selection import Selection

_Line = TypeVar("_Line")
POLL_S = 0.2  # With --follow, seconds between two checks for new records.
HELP = (
    "Show a log's requests, its steps, a request's events, a step, or the state at a step.\n\n"
    "[bold]Examples[/bold]\n\n"
    "  mmengine log show run.log                 all requests with their costs and ends\n\n"
    "  mmengine log show run.log --request r17   every event of a request\n\n"
    "  mmengine log show run.log --sort queued --limit 9   the requests that waited longest\n\n"
    "  mmengine log show run.log --preempted --slower-than 2s\n\n"
    "  mmengine log show run.log --steps         a line per step\n\n"
    "  mmengine log show run.log --step 120      a step's batch, budgets, and waiting requests\n\n"
    "  mmengine log show run.log --at 120        the whole state just before step 120; -1: at the end\n\n"
    "  mmengine log show logs                    a folder of replicas' logs: each request's path\n\n"
    "  mmengine log show run.log --steps --follow   the steps as they happen, until Ctrl-C\n\n"
    "[bold]Exit codes[/bold]\n\n"
    "0; 13 the log's end is missing; 14 the last file has no end mark; 6 truncated within a frame; 3 a "
    "decision cannot be applied, so the log was read up to there; 4 corrupt; 2 wrong arguments; 1 any other "
    "error. The readable part is shown in any case."
)


class Sort(StrEnum):
    """A value by which the list of requests is sorted."""

    total = "total"
    queued = "queued"
    preempted = "preempted"


SortBy = Annotated[
    Sort | None,
    typer.Option(
        help="Sort requests, the largest first: by total time, time in the queue, or preemptions.",
        show_default=False,
    ),
]
Finish = Annotated[
    str,
    typer.Option(
        metavar="REASON", help="Show only requests with this end, or unfinished ones.", show_default=False
    ),
]
SlowerThan = Annotated[
    str,
    typer.Option(
        metavar="TIME",
        help="Show only requests that took longer than 2s or 500ms, or have no end.",
        show_default=False,
    ),
]


def show(
    folder: Folder,
    request: Annotated[
        str | None, typer.Option(metavar="ID", help="Show the events of this request.")
    ] = None,
    steps: Annotated[bool, typer.Option("--steps", help="Show a line per step.")] = False,
    step: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Show this step and its waiting requests.")
    ] = None,
    at: Annotated[
        int | None, typer.Option(min=-1, metavar="N", help="Show the state before this step; -1: at the end.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Continue with a log that is being written.")
    ] = False,
    limit: Annotated[
        int,
        typer.Option(
            min=1, help="Maximum number of lines. The last lines are shown, or with --sort the first lines."
        ),
    ] = 40,
    sort: SortBy = None,
    preempted: Annotated[bool, typer.Option("--preempted", help="Show only preempted requests.")] = False,
    finish: Finish = "",
    slower_than: SlowerThan = "",
    wall: Annotated[bool, typer.Option("--wall", help="Show wall-clock times too.")] = False,
    json_output: Json = False,
) -> None:
    from mmengine.events.lock import is_locked  # Lazy, like all below: help needs none of them.
    from mmengine.events.log_end import log_end
    from mmengine.replay.queries.selection import Selection, duration_ns

    existing(folder)
    slower_ns = duration_ns(slower_than) if slower_than else -1
    selection = Selection(preempted, finish, slower_ns, None if sort is None else sort.value)
    is_list = request is None and not steps and step is None and at is None
    if selection.selects and (not is_list or fleet.is_fleet(folder) or follow and sort is not None):
        raise InvalidRequest(
            "--sort, --preempted, --finish and --slower-than select from the list of one log's requests; "
            "--sort does not go with --follow"
        )
    if fleet.is_fleet(folder):
        fleet.refuse_step_views(folder, steps or follow or step is not None or at is not None)
        if request is None:
            fleet.show_requests(folder, limit, json_output)
            return
        for log in fleet.print_path(folder, request, json_output):
            _print_events(log, request, json_output)
        return
    had_writer = not follow and is_locked(folder)
    views = [request is not None, steps, step is not None, at is not None]
    if sum(views) > 1 or follow and (step is not None or at is not None):
        raise InvalidRequest(
            "choose one of --request, --steps, --step and --at; --follow goes with the first two, or alone"
        )
    with reported(folder) as findings:
        if follow:
            _follow(folder, request, steps, selection, json_output, findings)
        elif is_list:
            _show_requests(folder, selection, limit, wall, json_output, findings)
        else:
            _show(folder, request, step, at, limit, wall, json_output, findings)
    if not follow and (end := log_end(folder, had_writer)).kind:
        sys.stdout.flush()
        print(f"mmengine: {printable(end.text)}", file=sys.stderr)
        raise typer.Exit(NO_END.get(end.kind, 4))


def _show_requests(
    folder: Path,
    selection: "Selection",
    limit: int,
    with_wall: bool,
    json_output: bool,
    findings: "Findings",
) -> None:
    """Print the list of requests."""
    from mmengine.cli.logs import show_tables as tables  # Lazy, like all below: help needs none of them.
    from mmengine.replay.queries.summaries import request_lines

    lines, total = selection.of(request_lines(folder, findings), limit)
    with_queued = selection.sort == Sort.queued.value
    shown = total if selection.selects else 0
    _list(
        tables.request_table(lines, shown, with_wall=with_wall, with_queued=with_queued), lines, json_output
    )


def _show(
    folder: Path,
    request: str | None,
    step: int | None,
    at: int | None,
    limit: int,
    with_wall: bool,
    json_output: bool,
    findings: "Findings",
) -> None:
    """Print a step, a state, a request's events, or the steps, depending on the arguments."""
    from mmengine.cli.logs import show_tables as tables  # Lazy, like all below: help needs none of them.

    if step is not None:
        from mmengine.replay.queries.step_report import step_report

        step_tables = partial(tables.step_tables, with_wall=with_wall)
        _one(step_report(folder, step, findings), step_tables, limit, json_output)
    elif at is not None:
        from mmengine.replay.queries.state_report import state_report

        _one(state_report(folder, at, findings), tables.state_tables, limit, json_output)
    elif request is not None:
        from mmengine.replay.checked_log import CheckedLog
        from mmengine.replay.queries.request_events import request_events
        from mmengine.replay.queries.request_names import find_requests
        from mmengine.replay.queries.wall_clock import WallClock

        names, clock = find_requests(folder, request), WallClock(folder)
        for name in names:
            if len(names) > 1 and not json_output:
                print(f"\n{printable(name)}")
            life = list(request_events(CheckedLog(folder, findings=findings), name, clock))
            _list(tables.life_table(life, with_wall=with_wall), life, json_output)
    else:
        from mmengine.replay.queries.summaries import step_lines

        last_steps = deque(step_lines(folder, findings), maxlen=limit)
        _list(tables.step_table(last_steps), last_steps, json_output)


def _print_events(log: Path, request: str, json_output: bool) -> None:
    """Print the events of a request and its choices. `log`: one log of a fleet."""
    from mmengine.cli.logs import show_tables as tables  # Lazy import.
    from mmengine.replay.checked_log import CheckedLog
    from mmengine.replay.queries.request_events import request_events
    from mmengine.replay.queries.request_names import matching_ids
    from mmengine.replay.queries.summaries import request_lines

    for name in matching_ids([line.request_id for line in request_lines(log)], request):
        if not json_output:
            print(f"\n{printable(log.name)}, {printable(name)}")
        lines = list(request_events(CheckedLog(log), name))
        _list(tables.life_table(lines), lines, json_output)


def _list(table: Any, lines: Iterable[Any], json_output: bool) -> None:
    if json_output:
        for line in lines:
            print_json(_builtins(line))
    else:
        console().print(table)


def _one(report: Any, tables: Any, limit: int, json_output: bool) -> None:
    if json_output:
        print_json(_builtins(report))
        return
    out = console()
    for part in tables(report, limit):
        out.print(part)


def _builtins(value: Any) -> dict[str, Any]:
    import msgspec  # Lazy import.

    return msgspec.to_builtins(value)


def _follow(
    folder: Path,
    request: str | None,
    steps: bool,
    selection: "Selection",
    json_output: bool,
    findings: "Findings",
) -> None:
    """Print lines as records arrive, until Ctrl-C."""
    import time

    from mmengine.replay.checked_log import CheckedLog  # Lazy import.

    def wait() -> bool:
        time.sleep(POLL_S)
        return True

    try:
        log = CheckedLog(folder, wait, findings=findings)
        _print_lines(log, request, steps, selection, json_output)
    except KeyboardInterrupt:
        return


def _print_lines(
    log: "CheckedLog", request: str | None, steps: bool, selection: "Selection", json_output: bool
) -> None:
    from mmengine.cli.logs import show_tables as tables  # Lazy import.
    from mmengine.replay.queries.request_events import request_events
    from mmengine.replay.queries.summaries import ended_requests, step_lines

    if request is not None:
        _print_each(request_events(log, request), tables.life_text, json_output)
    elif steps:
        _print_each(step_lines(log), tables.step_text, json_output)
    else:
        ended = filter(selection.has, ended_requests(log))
        _print_each(ended, tables.request_text, json_output)


def _print_each(lines: Iterable[_Line], text: Callable[[_Line], str], json_output: bool) -> None:
    for line in lines:
        if json_output:
            print_json(_builtins(line))
        else:
            print(text(line))
        sys.stdout.flush()
