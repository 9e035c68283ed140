"""`mmengine log verify`: replays logs, and prints the first divergence of each log as a table."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmengine.cli.logs.decoding import TokenizerFile, decoder_of
from mmengine.cli.logs.printing import Json, clean, console, existing, print_json, printable, short
from mmengine.cli.progress_bar import progress_bar
from mmengine.errors import NO_END, CorruptLog, LogError, code_of

if TYPE_CHECKING:  # Heavy; loaded when a command runs.
    from rich.table import Table

    from mmengine.events.codec import Record
    from mmengine.replay.queries.divergence_text import Decode
    from mmengine.replay.verify import Divergence, VerifyReport

HELP = (
    "Derive every decision in a log again, and compare it with the logged one.\n\n"
    "The first divergence is printed with its step, its fields, the logged and the derived values, the rule "
    "that probably differs, the last inputs before it, and the commands to run next. A folder of logs means "
    "all logs in it. With --invariants every reference to a block and an encoder output, every queue and "
    "every budget is counted again after each record, and the first wrong one is printed; this takes several "
    "times as long.\n\n"
    "A log that was recorded in vLLM is derived by the rules of vLLM's version, one scheduling call at a "
    "time. Code 5 then means that this build has no rules of that version, or does not model a feature. With "
    "--with vllm, in vLLM's environment, the scheduler of that version itself derives the log, without a "
    "model.\n\n"
    "[bold]Exit codes[/bold]\n\n"
    "0 no divergence; 3 diverged, or an invariant is broken; 4 corrupt; 5 folded only, because this build "
    "has other rules than the log; 2 wrong arguments; 1 any other error. No divergence, but the log has no "
    "end: 13 the end is missing, 14 the last file has no end mark (its process was killed, or the file was "
    "cut between two frames), 6 truncated within a frame. With many logs: the first of 4, 3, 1, 13, 14, 6, 5 "
    "among them.\n\n"
    "[bold]Examples[/bold]\n\n  mmengine log verify run.log\n\n  mmengine log verify nightly/*.log --json"
)
MAX_REQUESTS = 8  # Maximum number of request ids in a printed list.
SAME, OTHER, DIVERGED, CORRUPT, FOLDED = 0, 1, 3, 4, 5
_WORST_FIRST = (CORRUPT, DIVERGED, OTHER, *NO_END.values(), FOLDED, SAME)


def verify(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Logs, or folders of logs.", show_default=False)
    ],
    json_output: Json = False,
    after: Annotated[
        int | None,
        typer.Option(
            "--from", min=0, help="Begin at the newest snapshot before this record.", show_default=False
        ),
    ] = None,
    invariants: Annotated[
        bool, typer.Option("--invariants", help="Also count every reference and budget after each record.")
    ] = False,
    own: Annotated[
        str,
        typer.Option(
            "--with",
            help="vllm: derive with the installed vLLM's own scheduler; or MODULE:CLASS, a class of it.",
            show_default=False,
        ),
    ] = "",
    tokenizer: TokenizerFile = None,
) -> None:
    from mmengine.replay.verify import verify as verify_log  # Lazy: help does not need it.

    decode = None if tokenizer is None else decoder_of(tokenizer)
    logs = [log for folder in folders for log in _logs_in(existing(folder))]
    results: list[tuple[Path, VerifyReport | LogError]] = []
    with _progress(logs) as begin:
        for log in logs:
            try:
                results.append((log, verify_log(log, begin(log), after, invariants=invariants, own=own)))
            except LogError as error:
                if len(logs) == 1 and not json_output:
                    raise
                results.append((log, error))
    if json_output:
        for log, result in results:
            print_json({"log": str(log), **_as_json(log, result)})
    elif len(results) == 1 and not isinstance(report := results[0][1], LogError):
        _print_one(results[0][0], report, decode)
    else:
        _print_many(results, decode)
    codes = {_code(result) for _, result in results}
    raise typer.Exit(next(code for code in _WORST_FIRST if code in codes))


def _code(result: "VerifyReport | LogError") -> int:
    if isinstance(result, CorruptLog):
        return code_of(result)
    if isinstance(result, LogError):
        return OTHER
    if result.divergence is not None:
        return FOLDED if result.caveat else DIVERGED
    if result.end.kind:
        return NO_END.get(result.end.kind, CORRUPT)
    return SAME if result.rederived else FOLDED


def _logs_in(folder: Path) -> list[Path]:
    """Return the folder itself if it is a log, otherwise the logs directly in the folder."""
    if any(folder.glob("*.mmlog*")):
        return [folder]
    below = sorted({path.parent for path in folder.glob("*/*.mmlog*")})
    return below or [folder]


def report_lines(report: "VerifyReport") -> list[str]:
    """Return the lines that describe a verification."""
    from mmengine.events.log_end import CLOSED  # Lazy: help does not need it.

    lines = [
        f"{report.steps} steps, {report.events} events, {report.requests} requests, {report.tokens} tokens, "
        f"{report.checkpoints} state digests"
    ]
    if report.begins_after >= 0:
        lines.append(f"started at the snapshot after record {report.begins_after}")
    if report.torn is not None:
        lines.append(
            f"torn tail: {report.torn.num_bytes} bytes at the end of {report.torn.path.name} are not a whole "
            "record; a write was interrupted"
        )
    elif report.end != CLOSED:
        lines.append(report.end.text)
    if report.unfinished:
        lines.append(f"{len(report.unfinished)} requests have no end in this log")
    if report.left_over:
        names = ", ".join(map(printable, report.left_over[:MAX_REQUESTS]))
        more = (
            f" and {len(report.left_over) - MAX_REQUESTS} more"
            if len(report.left_over) > MAX_REQUESTS
            else ""
        )
        lines.append(
            f"the log ends before the next call, in which the rules schedule {names}{more}; if {report.host} "
            "went on running, its scheduler hung here"
        )
    return [*lines, _verdict(report)]


def _verdict(report: "VerifyReport | LogError") -> str:
    """Return the verdict on one log as one line."""
    if isinstance(report, LogError):
        return ("corrupt: " if isinstance(report, CorruptLog) else "") + str(report)
    found = report.divergence
    if report.host:
        return _hosted_verdict(report)
    if found is not None and found.field.startswith("invariant "):
        return f"BROKEN at step {found.step}, after record {found.sequence}, {found.event}: {found.field}"
    if found is not None and found.field == "crash":
        return f"CRASHED after step {found.step}, record {found.sequence}: {found.derived}"
    if found is not None:
        return f"DIVERGED at step {found.step}, record {found.sequence}: {found.event}, field {found.field}"
    if report.rederived and report.end.kind:
        return "no divergence, but the log has no end"
    if report.rederived:
        return "verified: no divergence"
    return f"folded; written under rules {report.logged_version}, this build has {report.version}"


def _hosted_verdict(report: "VerifyReport") -> str:
    """Return the verdict on a log whose decisions another engine made, such as vLLM."""
    found, host = report.divergence, report.host
    agree = f"{report.calls} scheduling calls of {host} agree with {report.decider}"
    if found is not None and found.field.startswith("invariant "):
        before = f" ({agree})" if found.field.endswith(" progress") else ""
        where = f"step {found.step}, after record {found.sequence}, {found.event}"
        return f"BROKEN at {where}: {found.field}{before}"
    if not report.rules:
        return f"folded; the decisions of {host} were not derived: {report.caveat}"
    if found is not None:
        where = f"step {found.step}, record {found.sequence}: {found.event}, field {found.field}"
        verdict = f"differs at {where}; {report.caveat}" if report.caveat else f"DIVERGED at {where}"
        return f"{verdict} ({agree} before it)"
    if report.caveat:
        return f"{agree}, but {report.caveat}"
    return f"{agree}, but the log has no end" if report.end.kind else f"verified: {agree}"


def _print_one(folder: Path, report: "VerifyReport", decode: "Decode | None") -> None:
    out = console()
    for line in report_lines(report):
        out.print(line, markup=False, soft_wrap=True)
    if not report.rederived and not report.host:
        out.print(
            "the state and its digests were compared; the decisions were not derived again, because this "
            "build has other rules",
            markup=False,
            soft_wrap=True,
        )
    if report.divergence is not None:
        for table in _divergence_tables(report, report.divergence, decode):
            out.print(table)
        for line in _advice(folder, report.divergence):
            out.print(line, markup=False, soft_wrap=True)


def _advice(folder: Path, found: "Divergence") -> list[str]:
    """Return lines with the commands to run next."""
    from mmengine.replay.queries.divergence_text import next_commands

    return ["next:", *(f"  {printable(command, 4096)}" for command in next_commands(folder, found))]


def _print_many(results: "list[tuple[Path, VerifyReport | LogError]]", decode: "Decode | None") -> None:
    from rich.table import Table

    table = Table("log", "steps", "events", "requests", "tokens", "unfinished", "result")
    for log, result in results:
        counts: tuple[int | str, ...] = ("", "", "", "", "")
        if not isinstance(result, LogError):
            unfinished = len(result.unfinished)
            counts = (result.steps, result.events, result.requests, result.tokens, unfinished)
        table.add_row(clean(str(log)), *map(str, counts), clean(_verdict(result)))
    out = console()
    out.print(table)
    for log, result in results:
        if not isinstance(result, LogError) and result.divergence is not None:
            out.print(f"\n{log}", markup=False, soft_wrap=True)
            for part in _divergence_tables(result, result.divergence, decode):
                out.print(part)
            for line in _advice(log, result.divergence):
                out.print(line, markup=False, soft_wrap=True)
    good = sum(_code(result) == SAME for _, result in results)
    out.print(f"{good} of {len(results)} logs verified", markup=False)


def _divergence_tables(
    report: "VerifyReport", found: "Divergence", decode: "Decode | None" = None
) -> "Iterator[Table]":
    """Yield a table that describes the divergence, and a table with the last inputs before it."""
    from rich.table import Table

    from mmengine.replay.queries.divergence_text import likely_rule, sides

    table = Table("", "", show_header=False)
    decided = (
        ("decided by", report.host), ("derived by", f"{report.decider}, mmengine {report.engine}")
    )  # fmt: skip
    if not report.host:
        decided = (
            ("written by", f"mmengine {report.logged_engine}, decision rules {report.logged_version}"),
            ("derived by", f"mmengine {report.engine}, decision rules {report.version}"),
        )
    for name, value in (
        ("step", str(found.step)),
        ("record", f"{found.sequence} {found.event}"),
        ("field", found.field),
        ("likely rule", likely_rule(found)),
        *_where(found),
        *_both(sides(found, decode)),
        *decided,
    ):
        table.add_row(name, clean(value))
    yield table
    if found.recent:
        inputs = Table("record", "step", "input", "", title="the last inputs before it", title_justify="left")
        for record in found.recent:
            inputs.add_row(str(record.sequence), str(record.step), *_input(record, found, decode))
        yield inputs


def _both(differing: list[tuple[str, str, str]]) -> Iterator[tuple[str, str]]:
    """Yield table rows with both values of each differing field."""
    for number, (field, logged, derived) in enumerate(differing):
        of = f" {field}" if number else ""
        yield f"logged{of}", logged
        yield f"derived{of}", derived


def _where(found: "Divergence") -> Iterator[tuple[str, str]]:
    """Yield table rows that describe a differing state digest: the last step with equal states, and the
    columns and requests that differ.
    """
    if found.event != "Checkpoint" or found.field == "event":
        return
    before = "never before in this log" if found.agreed is None else f"last at step {found.agreed[1]}"
    yield "the digests agreed", before
    if not found.columns:
        yield "columns", "the log does not say which (schema 1)"
        return
    yield "columns", ", ".join(found.columns)
    rows = [f"{name} (row {row})" if row >= 0 else f"{name} (waits)" for name, row in found.requests]
    more = f" and {len(rows) - MAX_REQUESTS} more" if len(rows) > MAX_REQUESTS else ""
    yield (
        "requests",
        ", ".join(rows[:MAX_REQUESTS]) + more or "no single request differs, or different requests are live",
    )


def _input(record: "Record", found: "Divergence", decode: "Decode | None") -> tuple[str, str]:
    from mmengine.replay.queries.divergence_text import event_text

    return type(record.event).__name__, clean(event_text(record.event, found, decode))


def _as_json(log: Path, report: "VerifyReport | LogError") -> dict[str, Any]:
    from mmengine.replay.queries.divergence_text import likely_rule, next_commands

    if isinstance(report, LogError):
        return {"ok": False, "exit_code": _code(report), "error": str(report)}
    found = report.divergence
    return {
        "ok": report.ok,
        "exit_code": _code(report),
        "rederived": report.rederived,
        "steps": report.steps,
        "events": report.events,
        "requests": report.requests,
        "tokens": report.tokens,
        "checkpoints": report.checkpoints,
        "end": {"kind": report.end.kind, "text": report.end.text},
        "torn_bytes": report.torn.num_bytes if report.torn is not None else 0,
        "unfinished": report.unfinished,
        "host": report.host,
        "rules": report.rules,
        "with": report.own,
        "caveat": report.caveat,
        "calls": report.calls,
        "left_over": [printable(name) for name in report.left_over],
        "written_by": {"engine": report.logged_engine, "decision_version": report.logged_version},
        "derived_by": {"engine": report.engine, "decision_version": report.version},
        "divergence": None
        if found is None
        else {
            "sequence": found.sequence,
            "step": found.step,
            "event": found.event,
            "field": found.field,
            "logged": short(found.logged),
            "derived": short(found.derived),
            "rule": found.rule,
            "request": printable(found.request_id),
            "likely_rule": printable(likely_rule(found)),
            "next": [printable(command, 4096) for command in next_commands(log, found)],
            "columns": found.columns,
            "requests": [{"request": printable(name), "row": row} for name, row in found.requests],
            "agreed": None
            if found.agreed is None
            else {"sequence": found.agreed[0], "step": found.agreed[1]},
            "inputs": [_input_json(record) for record in found.recent],
        },
    }


def _input_json(record: "Record") -> dict[str, Any]:
    kind = type(record.event).__name__
    return {"sequence": record.sequence, "step": record.step, "event": kind, "text": short(record.event)}


@contextmanager
def _progress(logs: list[Path]) -> "Iterator[Callable[[Path], Callable[[Record], None] | None]]":
    """On a terminal, show a progress bar over the bytes of all logs. Yields a function that returns a log's
    progress callback, or None if no bar is shown.
    """
    with progress_bar("verifying", count="percent") as bar:
        if not bar.is_shown:
            yield lambda log: None
            return
        sizes = {log: sum(path.stat().st_size for path in log.glob("*.mmlog*")) for log in logs}
        bar.update(total=sum(sizes.values()))
        before = 0

        def begin(log: Path) -> "Callable[[Record], None]":
            nonlocal before
            start, before = before, before + sizes[log]
            bar.update(start, text=f"verifying {printable(log.name)}")
            full = last = 0  # `full`: bytes in earlier segment files. `last`: offset in the current file.

            def move(record: "Record") -> None:
                nonlocal full, last
                if record.offset < last:
                    full += last
                last = record.offset
                if not record.sequence & 1023:
                    bar.update(start + min(full + last, sizes[log]))

            return move

        yield begin
