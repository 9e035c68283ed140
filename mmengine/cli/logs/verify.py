"""`mmengine log verify`."""

from typing import TYPE_CHECKING, Any

import typer

from mmengine.cli.logs.printing import Folder, Json, existing, print_json, short

if TYPE_CHECKING:
    from mmengine.replay.verify import Divergence, VerifyReport

HELP = (
    "Derive every decision in a log again, and compare it with what was logged.\n\n"
    "Exit code 0 when all agree, 1 at the first divergence, which is named: step, event, field, logged "
    "and derived value.\n\n"
    "[bold]Example[/bold]\n\n  mmengine log verify run.log"
)


def verify(folder: Folder, json_output: Json = False) -> None:
    from rich.console import Console  # lazy: help needs none of it

    from mmengine.replay.verify import verify as verify_log

    report = verify_log(existing(folder))
    if json_output:
        print_json(_report_json(report))
    else:
        console = Console(highlight=False, soft_wrap=True)
        for line in report_lines(report):
            console.print(line, markup=False)
    raise typer.Exit(0 if report.ok else 1)


def report_lines(report: "VerifyReport") -> list[str]:
    """What `verify` found, in words."""
    lines = [
        f"{report.steps} steps, {report.events} events, {report.requests} requests, {report.tokens} tokens, "
        f"{report.checkpoints} state digests"
    ]
    if report.torn is not None:
        lines.append(
            f"torn tail: {report.torn.num_bytes} bytes at the end of {report.torn.path.name} are no whole "
            "record; a write was cut short"
        )
    if report.unfinished:
        lines.append(f"{len(report.unfinished)} requests have no end in this log")
    if not report.rederived:
        lines.append(
            f"written under the rules of decision version {report.logged_version}, which this version does "
            "not have: folded and digests compared, decisions not derived again"
        )
    if report.divergence is not None:
        return [*lines, *_divergence_lines(report.divergence)]
    return [*lines, "verified: no divergence" if report.rederived else "folded: no divergence"]


def _divergence_lines(found: "Divergence") -> list[str]:
    lines = [
        f"DIVERGED at step {found.step}, record {found.sequence}: {found.event}, field {found.field}",
        f"  logged   {short(found.logged)}",
        f"  derived  {short(found.derived)}",
        "  observations before it:",
    ]
    return lines + [f"    {r.sequence:>8}  step {r.step}  {short(r.event, 120)}" for r in found.recent]


def _report_json(report: "VerifyReport") -> dict[str, Any]:
    found = report.divergence
    return {
        "ok": report.ok,
        "rederived": report.rederived,
        "steps": report.steps,
        "events": report.events,
        "requests": report.requests,
        "tokens": report.tokens,
        "torn_bytes": report.torn.num_bytes if report.torn is not None else 0,
        "unfinished": report.unfinished,
        "divergence": None
        if found is None
        else {
            "sequence": found.sequence,
            "step": found.step,
            "event": found.event,
            "field": found.field,
            "logged": short(found.logged),
            "derived": short(found.derived),
        },
    }
