"""`mmengine log show`: requests, steps, one request's life, one step, the state at a step."""

import sys
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from mmengine.cli.logs import fleet
from mmengine.cli.logs.printing import Folder, Json, console, existing, print_json, printable
from mmengine.errors import NO_END, InvalidRequest, LogError

if TYPE_CHECKING:  # heavy: loaded when a command runs
    from mmengine.replay.checked_log import CheckedLog

_Line = TypeVar("_Line")
POLL_S = 0.2  # how often --follow looks
HELP = (
    "Show the requests of a log, its steps, one request's life, one step, or the state at a step.\n\n"
    "[bold]Examples[/bold]\n\n"
    "  mmengine log show run.log                 requests: what each took, and how it ended\n\n"
    "  mmengine log show run.log --request r17   every event of one request\n\n"
    "  mmengine log show run.log --steps         one line a step\n\n"
    "  mmengine log show run.log --step 120      its batch, its budgets, who waited and why\n\n"
    "  mmengine log show run.log --at 120        the whole state just before step 120; -1: at the end\n\n"
    "  mmengine log show logs                    a folder of replicas' logs: where each request went\n\n"
    "  mmengine log show run.log --steps --follow   as the steps come, until Ctrl-C\n\n"
    "[bold]Exit codes[/bold]\n\n"
    "0; 13 the end of the log is missing; 14 nothing says that it is the end; 6 it is cut short within a "
    "frame; 4 corrupt; 2 wrong arguments; 1 anything else. What is there is shown all the same."
)


def show(
    folder: Folder,
    request: Annotated[str | None, typer.Option(metavar="ID", help="The life of one request.")] = None,
    steps: Annotated[bool, typer.Option("--steps", help="One line a step.")] = False,
    step: Annotated[int | None, typer.Option(min=0, metavar="N", help="One step, and who waited.")] = None,
    at: Annotated[int | None, typer.Option(min=-1, metavar="N", help="The state before a step.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with a log that is being written.")
    ] = False,
    limit: Annotated[int, typer.Option(min=1, help="Most lines shown of a list; the last ones.")] = 40,
    json_output: Json = False,
) -> None:
    from mmengine.cli.logs import show_tables as tables  # lazy, like all below: help needs none of it
    from mmengine.events.lock import is_locked
    from mmengine.events.log_end import log_end
    from mmengine.replay.queries.summaries import request_lines, step_lines

    existing(folder)
    if fleet.is_fleet(folder):
        fleet.only_requests(folder, steps or follow or step is not None or at is not None)
        if request is None:
            fleet.show_requests(folder, limit, json_output)
            return
        for log in fleet.tell_of(folder, request, json_output):
            _lives(log, request, json_output)
        return
    had_writer = not follow and is_locked(folder)
    views = [request is not None, steps, step is not None, at is not None]
    if sum(views) > 1 or follow and (step is not None or at is not None):
        raise InvalidRequest(
            "choose one of --request, --steps, --step and --at; --follow goes with the first two, or alone"
        )
    if follow:
        _follow(folder, request, steps, json_output)
    elif step is not None:
        from mmengine.replay.queries.step_report import step_report

        _one(step_report(folder, step), tables.step_tables, limit, json_output)
    elif at is not None:
        from mmengine.replay.queries.state_report import state_report

        _one(state_report(folder, at), tables.state_tables, limit, json_output)
    elif request is not None:
        from mmengine.replay.checked_log import CheckedLog
        from mmengine.replay.queries.request_events import request_events

        life = list(request_events(CheckedLog(folder), request))
        if not life:
            raise LogError(f"no request in {folder} has that id; see mmengine log show {folder}")
        _list(tables.life_table(life), life, json_output)
    elif steps:
        last_steps = deque(step_lines(folder), maxlen=limit)
        _list(tables.step_table(last_steps), last_steps, json_output)
    else:
        last_requests = deque(request_lines(folder), maxlen=limit)
        _list(tables.request_table(last_requests), last_requests, json_output)
    if not follow and (end := log_end(folder, had_writer)).kind:
        sys.stdout.flush()
        print(f"mmengine: {printable(end.text)}", file=sys.stderr)
        raise typer.Exit(NO_END.get(end.kind, 4))


def _lives(log: Path, request: str, json_output: bool) -> None:
    """What one of several logs has of a request and its choices."""
    from mmengine.cli.logs import show_tables as tables  # lazy
    from mmengine.replay.checked_log import CheckedLog
    from mmengine.replay.queries.fleet import core_ids
    from mmengine.replay.queries.request_events import request_events
    from mmengine.replay.queries.summaries import request_lines

    for name in core_ids([line.request_id for line in request_lines(log)], request):
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
    import msgspec  # lazy

    return msgspec.to_builtins(value)


def _follow(folder: Path, request: str | None, steps: bool, json_output: bool) -> None:
    """Lines as they come, until Ctrl-C."""
    import time

    from mmengine.replay.checked_log import CheckedLog  # lazy

    def wait() -> bool:
        time.sleep(POLL_S)
        return True

    try:
        _print_lines(CheckedLog(folder, wait), request, steps, json_output)
    except KeyboardInterrupt:
        return


def _print_lines(log: "CheckedLog", request: str | None, steps: bool, json_output: bool) -> None:
    from mmengine.cli.logs import show_tables as tables  # lazy
    from mmengine.replay.queries.request_events import request_events
    from mmengine.replay.queries.summaries import ended_requests, step_lines

    if request is not None:
        _print_each(request_events(log, request), tables.life_text, json_output)
    elif steps:
        _print_each(step_lines(log), tables.step_text, json_output)
    else:
        _print_each(ended_requests(log), tables.request_text, json_output)


def _print_each(lines: Iterable[_Line], text: Callable[[_Line], str], json_output: bool) -> None:
    for line in lines:
        if json_output:
            print_json(_builtins(line))
        else:
            print(text(line))
        sys.stdout.flush()
