"""`mmengine log redact`: writes a copy of a log without user content, for publication."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmengine.bounded_files import read_bounded
from mmengine.cli.logs.findings import reported
from mmengine.cli.logs.printing import Json, console, existing, print_json
from mmengine.errors import InvalidRequest

if TYPE_CHECKING:  # Heavy; loaded when a command runs.
    from mmengine.replay.convert.redact import RedactReport
    from mmengine.replay.verify import VerifyReport

HELP = (
    "Write a log without user content, for publication.\n\n"
    "Each token becomes a number that depends on all tokens before it and on a secret key, so that only "
    "equal prefixes stay equal. Ids, salts and media hashes become keyed hashes. Grammars, stop strings, "
    "logprobs and error texts are dropped. Lengths, shapes, times and settings stay. The result has the same "
    "decisions, and is verified at the end.\n\n"
    "[bold]Example[/bold]\n\n  mmengine log redact run.log public.log"
)
MAX_KEY_BYTES = 2**20


def redact(
    source: Annotated[Path, typer.Argument(metavar="IN", help="Log to redact.", show_default=False)],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="New folder.", show_default=False)],
    key: Annotated[
        Path | None,
        typer.Option(help="File with 16 bytes or more; the same key gives the same names."),
    ] = None,
    json_output: Json = False,
) -> None:
    from mmengine.replay.convert.redact import redact as redact_log  # Lazy: numpy
    from mmengine.replay.verify import verify

    existing(source)
    if target.exists() and any(target.iterdir() if target.is_dir() else [target]):
        raise InvalidRequest(f"{target} already exists; name a new folder")
    secret = os.urandom(32) if key is None else _key_in(key)
    with reported(source) as findings:
        report = redact_log(source, target, secret, findings)
        _print(source, target, report, verify(target), json_output)


def _print(
    source: Path, target: Path, report: "RedactReport", verified: "VerifyReport", json_output: bool
) -> None:
    if json_output:
        print_json(
            {
                "records": report.records,
                "requests": report.requests,
                "tokens": report.tokens,
                "verified": verified.ok and verified.rederived,
            }
        )
    else:
        out = console()
        counts = f"{report.records} records, {report.requests} requests, {report.tokens} tokens"
        text = f"{counts} redacted to {target}"
        out.print(text, markup=False, soft_wrap=True)
        if verified.divergence is not None:
            found = verified.divergence
            where = f"step {found.step}, record {found.sequence}"
            out.print(f"diverges at {where}, like the original log: see mmengine log verify {source}")
        elif verified.rederived:
            out.print("verified: the redacted log has the same decisions")
        else:
            out.print("folded: the log's decisions were made under other rules than this build's")


def _key_in(path: Path) -> bytes:
    try:
        return read_bounded(path, MAX_KEY_BYTES)
    except OSError as error:
        raise InvalidRequest(f"the key in {path} cannot be read: {error.strerror}") from None
