"""`mmengine log fsck`: checks a log's files byte by byte, and lists what they contain."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from mmengine.cli.logs.printing import Folder, Json, clean, console, existing, print_json, printable

if TYPE_CHECKING:  # Heavy; loaded when a command runs.
    from rich.table import Table

    from mmengine.events.fsck import FsckReport

HELP = (
    "Check every byte of a log, list its segments, and repair its tail.\n\n"
    "Only bytes are checked; verify derives the decisions. A killed process or a power cut may leave a torn "
    "tail; --repair cuts it off (the bytes stay in a .cut file) and closes the log. Damage before the tail "
    "is only reported.\n\n"
    "[bold]Exit codes[/bold]\n\n"
    "0 whole; 4 bytes contradict their checksum; 6 truncated; 7 a length that reaches past the end; 8 a "
    "format or a type newer than this build; 9 an impossible size; 10 a link; 11 another process writes the "
    "log; 12 records are missing; 13 the end is missing; 14 the last file has no end mark: its process was "
    "killed, or the file was cut between two frames; 2 wrong arguments; 1 any other error. With several "
    "findings: the first one's code. An unfinished write by a running process is not a finding.\n\n"
    "[bold]Examples[/bold]\n\n  mmengine log fsck run.log\n\n  mmengine log fsck run.log --repair"
)


def fsck(
    folder: Folder,
    repair: Annotated[bool, typer.Option("--repair", help="Cut off a torn tail, and close the log.")] = False,
    json_output: Json = False,
) -> None:
    from mmengine.events.fsck import fsck as check  # Lazy: --help must not import it.

    report = check(existing(folder), repair=repair)
    if json_output:
        print_json(_as_json(report))
    else:
        _print(report)
    raise typer.Exit(report.exit_code)


def _print(report: "FsckReport") -> None:
    out = console()
    if report.segments:
        out.print(_table(report))
    if report.snapshots:
        out.print(f"{len(report.snapshots)} snapshots, the last one after record {report.snapshots[-1]}")
    lines = [f"repaired: {cut}" for cut in report.repaired.cuts] if report.repaired is not None else []
    lines += [f"{finding.kind}: {finding.text}" for finding in report.findings]
    for line in [*lines, *_verdict(report)]:
        out.print(printable(line), markup=False, soft_wrap=True)


def _verdict(report: "FsckReport") -> list[str]:
    if report.findings:
        return []
    records = sum(segment.records for segment in report.segments)
    so_far = " so far" if report.has_writer else ""
    return [f"whole{so_far}: {records} records; {report.end.text}"] if report.end is not None else []


def _table(report: "FsckReport") -> "Table":
    from datetime import UTC, datetime

    from rich.table import Table

    table = Table(
        "segment", "bytes", "records", "sequences", "steps", "begun", "requests", "ended", "tokens", ""
    )
    for each in report.segments:
        begun = datetime.fromtimestamp(each.wall_ns / 1e9, UTC).strftime("%F %T") if each.wall_ns else ""
        end = "closed" if each.is_closed else "open"
        table.add_row(
            clean(each.name.split(".")[0].lstrip("0") or "0")
            + (" zst" if each.name.endswith(".zst") else ""),
            f"{each.num_bytes:,}",
            f"{each.records:,}",
            f"{each.first_sequence}-{each.last_sequence}" if each.records else "",
            f"{each.first_step}-{each.last_step}" if each.records else "",
            begun,
            str(each.queued),
            str(each.finished),
            f"{each.tokens:,}",
            end,
        )
    return table


def _as_json(report: "FsckReport") -> dict:
    cuts = report.repaired.cuts if report.repaired is not None else []
    return {
        "exit_code": report.exit_code,
        "is_closed": report.is_closed,
        "end": report.end.text if report.end is not None else "",
        "has_writer": report.has_writer,
        "findings": [asdict(finding) for finding in report.findings],
        "repaired": [str(cut) for cut in cuts],
        "snapshots": report.snapshots,
        "segments": [asdict(segment) for segment in report.segments],
    }
