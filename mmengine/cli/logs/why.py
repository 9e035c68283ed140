"""`mmengine log why`: explains what happened to a request, in sentences with step numbers."""

from typing import TYPE_CHECKING, Annotated

import typer

from mmengine.cli.logs import fleet
from mmengine.cli.logs.findings import reported
from mmengine.cli.logs.printing import Folder, Json, console, existing, ms, print_json, printable

if TYPE_CHECKING:  # Heavy; loaded when a command runs.
    from mmengine.replay.queries.why import Claim

HELP = (
    "Explain why a request waited, was preempted, missed the caches and ended.\n\n"
    "Each sentence has its step; inspect a step with mmengine log show DIR --step N. The id may be the log's "
    "or the client's (chatcmpl-…, resp_…, msg_…, batch_req_…, a batch line's custom_id). For a call with n "
    "answers, each is explained.\n\n"
    "[bold]Example[/bold]\n\n  mmengine log why run.log r17"
)


def why(
    folder: Folder,
    request: Annotated[str, typer.Argument(metavar="REQUEST", help="Request id.", show_default=False)],
    json_output: Json = False,
) -> None:
    from mmengine.replay.queries.request_names import find_requests, matching_ids
    from mmengine.replay.queries.why import why as explain  # Lazy: help does not need it.

    if not fleet.is_fleet(existing(folder)):
        names = find_requests(folder, request)
        with reported(folder) as findings:
            for name in names:
                if name != request and not json_output:
                    print(f"\n{printable(name)}")
                claims = explain(folder, name, findings)
                _print(claims, json_output, name if len(names) > 1 else "")
        return
    from mmengine.replay.queries.summaries import request_lines

    for log in fleet.print_path(folder, request, json_output):
        for name in matching_ids([line.request_id for line in request_lines(log)], request):
            if not json_output:
                print(f"\n{printable(log.name)}, {printable(name)}")
            with reported(log) as findings:
                _print(explain(log, name, findings), json_output)


def _print(claims: "list[Claim]", json_output: bool, request_id: str = "") -> None:
    """Print the claims. `request_id`: if not empty, the id is added to each claim's JSON."""
    import msgspec  # Lazy import.

    if json_output:
        for claim in claims:
            named = {"request_id": request_id} if request_id else {}
            print_json({**named, **msgspec.to_builtins(claim)})
        return
    import textwrap

    out = console()
    width = max(len(_steps(claim.step, claim.last_step)) for claim in claims)
    for claim in claims:
        steps = _steps(claim.step, claim.last_step).ljust(width)
        head = f"{steps}  {ms(claim.since_ns):>9} ms  "
        lines = textwrap.wrap(printable(claim.text, 1000), max(40, out.width - len(head))) or [""]
        for line in lines:
            out.print(head + line, markup=False, soft_wrap=True)
            head = " " * len(head)


def _steps(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"
