"""Prints the findings of a `mmengine log` command. A finding is a logged decision that breaks a rule."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from mmengine.cli.logs.printing import printable

if TYPE_CHECKING:  # Heavy; loaded when a command runs.
    from mmengine.replay.findings import Findings

INCOMPLETE = 3  # Exit code if a decision in the log cannot be applied to the state.
MAX_LINES = 3  # Maximum number of findings that are printed.


@contextmanager
def reported(folder: Path) -> Iterator["Findings"]:
    """Yield an object that collects findings from the log in `folder`. The findings are printed to stderr
    after the `with` block.

    Exits with INCOMPLETE if the log was not read to its end.
    """
    from mmengine.replay.findings import Findings  # Lazy: help does not need it.

    findings = Findings()
    try:
        yield findings
    except BaseException:
        _tell(findings, folder)
        raise
    _tell(findings, folder)
    if findings.last is not None:
        raise typer.Exit(INCOMPLETE)


def _tell(findings: "Findings", folder: Path) -> None:
    if not findings:
        return
    sys.stdout.flush()
    shown = findings.listed[:MAX_LINES]
    lines = [str(finding) for finding in shown]
    if more := findings.count - len(shown):
        lines.append(f"{more} more decisions break a rule")
    if findings.last is not None and findings.last not in shown:
        lines.append(str(findings.last))
    if findings.last is not None:
        lines.append(f"the log was read up to record {findings.last.sequence}; the state after it is unknown")
    rule = findings.listed[0].rule
    verify = f"mmengine log verify {folder} --invariants"
    lines.append(f"next: {verify}; mmengine log minimize {folder} --failing {rule} -o small")
    for line in lines:
        print(f"mmengine: {printable(line, 1000)}", file=sys.stderr)
