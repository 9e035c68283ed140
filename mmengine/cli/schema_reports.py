"""Implements `mmengine schema check`: reads JSON schema files, checks each schema, and prints the results."""

import codecs
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypedDict

import msgspec

from mmengine.bounded_files import read_bounded
from mmengine.cli.logs.printing import clean, console, print_json, printable
from mmengine.decode_errors import utf16_hint
from mmengine.errors import InvalidRequest
from mmengine.structured_output.json_schema.emission.bounds import Bounds
from mmengine.structured_output.json_schema.reading.loading import MAX_BYTES
from mmengine.structured_output.json_schema.vocabulary.keywords import KNOWN
from mmengine.structured_output.json_schema.vocabulary.notes import Note
from mmengine.structured_output.report.report import SchemaReport, check_schema

if TYPE_CHECKING:
    from mmengine.structured_output.engines.base import Backend

MAX_ROWS = 40  # A longer table leaves out schemas with the verdict `exact`.
MAX_POINTERS = 3  # Maximum number of JSON pointers that are printed for a note.
STDIN = Path("-")


class CheckOptions(TypedDict):
    """Options of `check_schema`."""

    bounds: Bounds | None
    strict: bool
    strict_keywords: bool


class Checked(NamedTuple):
    """The result of checking one file. `error`: why there is no report, or ""."""

    name: str
    report: SchemaReport | None
    error: str = ""


def check_all(
    paths: list[Path], grammar_backend: str, tokenizer: Path | None, options: CheckOptions
) -> Iterator[Checked]:
    """Check the schemas and yield the results one by one.

    Raises InvalidRequest for a folder without .json files, and ConfigError for an unknown grammar backend.
    """
    backend = grammar_backend if tokenizer is None else _backend(grammar_backend, tokenizer)
    for path in _files(paths):
        try:
            report = check_schema(_schema_in(path), backend=backend, **options)
            yield Checked(str(path), report)
        except (InvalidRequest, OSError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            yield Checked(str(path), None, why or "it cannot be read")


def _backend(name: str, folder: Path) -> "Backend":
    from mmengine.models.registry import plugin_for  # Lazy: numpy and a tokenizer
    from mmengine.structured_output.engines.backends import GRAMMAR_BACKENDS

    tokenizer = plugin_for(folder).load_processor(folder).tokenizer
    tokens = tokenizer.token_bytes()
    # Any token can be the end token, because no text is generated.
    eos = max(tokenizer.special_ids, default=len(tokens) - 1)
    make = GRAMMAR_BACKENDS.load(name)
    return make(lambda: tokens, tokenizer.encode, tokenizer.special_ids, [eos], len(tokens))


def _files(paths: list[Path]) -> Iterator[Path]:
    for path in paths:
        if path == STDIN or not path.is_dir():
            yield path
            continue
        found = sorted(each for each in path.rglob("*.json") if each.is_file())
        if not found:
            raise InvalidRequest(f"{path} contains no .json files")
        yield from found


def _schema_in(path: Path) -> object:
    """Return the schema in a file. The file contains the schema itself, a response_format, or an object with
    the key `schema`.
    """
    if path == STDIN:
        data = sys.stdin.buffer.read(MAX_BYTES + 1)
    else:
        data = read_bounded(path, MAX_BYTES)
    if len(data) > MAX_BYTES:
        raise InvalidRequest(f"the schema has more than {MAX_BYTES:,} bytes")
    try:
        found = msgspec.json.decode(data.removeprefix(codecs.BOM_UTF8))
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidRequest(f"it is not JSON: {utf16_hint(data) or error}") from None
    inner = found.get("json_schema", found) if isinstance(found, dict) else found
    if isinstance(inner, dict) and "schema" in inner and not KNOWN & (inner.keys() - {"description"}):
        return inner["schema"]
    return data if inner is found else inner


def print_reports(checked: Iterator[Checked], as_json: bool) -> int:
    """Print the results as JSON lines or as a table, and return the exit code."""
    reports = list(_printed(checked)) if as_json else list(checked)
    verdicts = Counter(each.report.verdict if each.report else "unreadable" for each in reports)
    if as_json:
        if len(reports) > 1:
            print_json({"summary": dict(verdicts), "refused_by_keyword": _by_keyword(reports)})
    elif len(reports) == 1:
        _print_one(reports[0])
    else:
        _print_table(reports, verdicts)
    return 2 if verdicts["unreadable"] else 1 if verdicts["refused"] else 0


def _printed(checked: Iterator[Checked]) -> Iterator[Checked]:
    for each in checked:
        said = (
            msgspec.to_builtins(each.report) if each.report else {"verdict": "unreadable", "why": each.error}
        )
        print_json({"file": each.name, **said})
        yield each


def _by_keyword(reports: list[Checked]) -> dict[str, int]:
    refused = [each.report for each in reports if each.report and each.report.verdict == "refused"]
    return dict(Counter(report.keyword or "the whole schema" for report in refused).most_common())


def _print_one(checked: Checked) -> None:
    out, report = console(), checked.report
    name = clean(checked.name)
    if report is None:
        out.print(f"[bold]{name}[/bold]: cannot be read: {clean(checked.error)}", soft_wrap=True)
        return
    out.print(f"[bold]{name}[/bold]: [bold]{report.verdict}[/bold]", soft_wrap=True)
    if report.verdict == "refused":
        out.print(f"  {clean(report.why)}", soft_wrap=True)
        return
    for title, notes in (
        ("left out of the schema's values", report.approximations),
        ("left out by bounds and order", report.bounds),
        ("notes", report.notes),
    ):
        if notes:
            out.print(f"  {title}:")
        for text, pointers in _grouped(notes):
            out.print(f"    {printable(text)}  ({printable(pointers)})", markup=False, soft_wrap=True)
    out.print(f"  {_costs(report)}", soft_wrap=True)


def _grouped(notes: tuple[Note, ...]) -> Iterator[tuple[str, str]]:
    """Yield each distinct note's text once, with JSON pointers into the schema."""
    ordered = sorted(notes, key=lambda note: note.text)
    for text, group in groupby(ordered, key=lambda note: note.text):
        places = [note.pointer for note in group]
        more = f" and {len(places) - MAX_POINTERS} more" if len(places) > MAX_POINTERS else ""
        yield text, ", ".join(places[:MAX_POINTERS]) + more


def _costs(report: SchemaReport) -> str:
    masks = report.masks
    took = f"gate {report.gate_ms:.1f} ms, compilation {report.compile_ms:.1f} ms"
    said = f"{took}, {report.grammar_bytes:,} bytes"
    if masks is None:
        return said
    return f"{said}; a mask {masks.mean_us:.0f} µs (p99 {masks.p99_us:.0f}, most {masks.max_us:.0f})"


def _print_table(reports: list[Checked], verdicts: Counter[str]) -> None:
    from rich.table import Table  # Lazy: only tables need rich.

    out, table = console(), Table(box=None, pad_edge=False)
    for name in ("file", "verdict", "keyword", "where", "why", "ms", "mask µs"):
        table.add_column(name, justify="right" if name in ("ms", "mask µs") else "left", overflow="fold")
    shown = [each for each in reports if len(reports) <= MAX_ROWS or not _is_exact(each)]
    for each in shown:
        table.add_row(*_row(each))
    if shown:
        out.print(table)
    total = len(reports)
    counts = ", ".join(
        f"{count} {name} ({100 * count / total:.1f} %)" for name, count in verdicts.most_common()
    )
    out.print(f"{total} schemas: {counts}", soft_wrap=True)
    for keyword, count in _by_keyword(reports).items():
        out.print(f"  {count:6} refused by {clean(keyword)}", soft_wrap=True)


def _is_exact(checked: Checked) -> bool:
    return checked.report is not None and checked.report.verdict == "exact"


def _row(checked: Checked) -> list[str]:
    report, name = checked.report, clean(checked.name)
    if report is None:
        return [name, "unreadable", "", "", clean(checked.error), "", ""]
    keyword, pointer = report.keyword, report.pointer
    why = report.reason
    if report.approximations:
        first = report.approximations[0]
        keyword, pointer, why = first.keyword, first.pointer, first.text
    took = f"{report.gate_ms + report.compile_ms:.1f}" if report.grammar_bytes else ""
    masks = f"{report.masks.mean_us:.0f}" if report.masks else ""
    return [name, report.verdict, clean(keyword), clean(pointer), clean(why), took, masks]
