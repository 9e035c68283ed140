"""Runs every `mmengine log` command on a log, for the tests with golden logs, mutated logs, and logs from
engines with planted bugs.
"""

from pathlib import Path

from mmengine.errors import LogError
from mmengine.replay import request_lines
from tests.cli.cli_process import call_cli

# The exit codes that a command may have. 0: success; 1 and 2: the command refuses the log or its arguments; 3
# to 14: the documented results.
EXPECTED = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14}


# Commands that the tests with golden logs skip, because they take long or read a log in the same way as
# another command.
LONG = (
    *(("rerun",), ("minimize",), ("verify", "--invariants"), ("show", "--step"), ("show", "--steps")),
    *(("show", "--at", "3"), ("show", "--request"), ("export", "--csv"), ("export", "--mooncake")),
)


def commands(log: Path, other: Path, request: str, out: Path) -> list[tuple[str, ...]]:
    """Return the arguments of every command that only reads `log`. `other`: a log to compare with. `out`: a
    folder for results.
    """
    return [
        ("show",),
        ("show", "--steps"),
        ("show", "--step", "2"),
        ("show", "--at", "3"),
        ("show", "--at", "-1"),
        ("show", "--request", request),
        ("why", request),
        ("report", "-o", f"{out}/page.html"),
        ("rerun",),
        ("debug", "--ex", "goto end", "--ex", "rs", "--ex", "info queue", "--ex", "info blocks"),
        ("export", "--csv"),
        ("export", "--csv", "--steps"),
        ("export", "--mooncake"),
        ("export", "--perfetto"),
        ("redact", f"{out}/public"),
        ("kv-events",),
        ("diff", str(other)),
        ("verify",),
        ("verify", "--invariants"),
        ("fsck",),
        ("minimize", "--failing", "any", "--seconds", "1", "-o", f"{out}/small"),
    ]


def a_request(log: Path) -> str:
    """Return the id of a request in the middle of the log, or "r0" if no request can be read."""
    try:
        lines = request_lines(log)
    except LogError:
        return "r0"
    return lines[len(lines) // 2].request_id if lines else "r0"


def failures(log: Path, other: Path, out: Path, skip: tuple[tuple[str, ...], ...] = ()) -> list[str]:
    """Run all commands, and return the output of each that printed a traceback or ended unexpectedly. `skip`:
    the beginnings of commands that are left out.
    """
    out.mkdir()
    found = []
    for verb, *arguments in commands(log, other, a_request(log), out):
        if any((verb, *arguments)[: len(words)] == words for words in skip):
            continue
        done = call_cli("log", verb, log, *arguments, cwd=out)
        texts = done.stdout + done.stderr
        if "Traceback" in texts or done.returncode not in EXPECTED:
            found.append(f"{verb} {' '.join(arguments)}: exit code {done.returncode}\n{texts[-2000:]}")
    return found
