"""`mmengine log why`: a request's story, each sentence with its step."""

from typing import Annotated

import typer

from mmengine.cli.logs.printing import Folder, Json, console, existing, ms, print_json, printable

HELP = (
    "Say in sentences why a request waited, was preempted, missed the caches and ended.\n\n"
    "Each claim has its step; look there with mmengine log show DIR --step N.\n\n"
    "[bold]Example[/bold]\n\n  mmengine log why run.log r17"
)


def why(
    folder: Folder,
    request: Annotated[str, typer.Argument(metavar="REQUEST", help="Its id.", show_default=False)],
    json_output: Json = False,
) -> None:
    import msgspec  # lazy, like all below: help needs none of it

    from mmengine.replay.ask.why import why as explain

    claims = explain(existing(folder), request)
    if json_output:
        for claim in claims:
            print_json(msgspec.to_builtins(claim))
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
