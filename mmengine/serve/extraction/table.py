"""Writes results as a table: JSON lines, CSV or Parquet. A table is written whole or not at all."""

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from mmengine.errors import ConfigError
from mmengine.events.file_system import replacing
from mmengine.extras import install_hint
from mmengine.serve.extraction.columns import OTHER, Columns, text_of
from mmengine.serve.extraction.results import JsonValue, Result

if TYPE_CHECKING:  # An optional dependency.
    from pyarrow import DataType, RecordBatch

FORMATS = (".jsonl", ".csv", ".parquet")
HEAD = ("document", "page", "status", "error", "check", "confidence")
P = "p:"  # Prefix for the names of columns with probabilities.
# A spreadsheet program treats a text as a formula if the text begins with one of these characters. The last
# four are the full-width forms of =, +, - and @.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")
_BATCH_ROWS = 4096
_INT64 = range(-(2**63), 2**63)


def check_format(out: Path) -> None:
    """Raise ConfigError if the format is unknown, or if the format's library is missing."""
    if out.suffix.lower() not in FORMATS:
        raise ConfigError(f"--out {out}: the name must end in one of {', '.join(FORMATS)}")
    if out.suffix.lower() == ".parquet":
        try:
            import pyarrow.parquet  # noqa: F401 Lazy: only Parquet needs it
        except ImportError:
            hint = install_hint("parquet")
            raise ConfigError(
                f"--out {out} needs pyarrow: {hint}; .csv and .jsonl files need no further package"
            ) from None


def write_table(results: Iterable[Result], schema: bytes, out: Path) -> None:
    """Write the results to `out`, in the format of its suffix. `results` may be iterated several times."""
    write = {".jsonl": _write_jsonl, ".csv": _write_csv, ".parquet": _write_parquet}[out.suffix.lower()]
    with replacing(out) as part:
        write(results, Columns(json.loads(schema)), part)


def _write_jsonl(results: Iterable[Result], columns: Columns, path: Path) -> None:
    with path.open("wb") as file:
        for result in results:
            # A lone surrogate becomes its JSON escape.
            file.write(json_line(result).encode(errors="backslashreplace") + b"\n")


def json_line(result: Result) -> str:
    """Return a result as a JSON object. The field "value" is the model's JSON, inserted without parsing."""
    head: dict[str, object] = {
        "document": result.document,
        "page": result.page,
        "status": result.status,
        "error": result.error or None,
        "check": result.check,
        "confidence": msgspec.to_builtins(result.confidence),
    }
    if result.boxes:
        boxes = {name: {"pixels": box.pixels, "problem": box.problem} for name, box in result.boxes.items()}
        head["boxes"] = boxes
    # Line breaks in valid JSON occur only between tokens. `splitlines` would also split inside strings, at
    # U+2028.
    text = result.text.replace("\r", " ").replace("\n", " ") or "null"
    return f'{json.dumps(head, ensure_ascii=False)[:-1]}, "value": {text}}}'


def _write_csv(results: Iterable[Result], columns: Columns, path: Path) -> None:
    with path.open("w", encoding="utf-8", errors="replace", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_NONNUMERIC)
        writer.writerow(
            [*HEAD, *(column or "value" for column in columns.names), OTHER, *map(_p_name, columns.names)]
        )
        for result in results:
            cells = cells_of(result, columns)
            writer.writerow([_csv_cell(cells[name]) for name in cells])


def _csv_cell(value: JsonValue) -> str | int | float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    return plain_text(text_of(value))


def plain_text(text: str) -> str:
    """Return `text`, preceded by an apostrophe if a spreadsheet program would treat `text` as a formula."""
    return f"'{text}" if text.startswith(_FORMULA) else text


def cells_of(result: Result, columns: Columns) -> dict[str, JsonValue]:
    """Return a row's cells by column: HEAD, the values, OTHER (values that the schema does not name), and the
    probabilities. The probability for an array or an object is the lowest probability among its fields.
    """
    flat = columns.flatten(result.value)
    other = flat.get(OTHER)
    found: dict[str, JsonValue] = {
        "document": result.document,
        "page": result.page,
        "status": result.status,
        "error": result.error or None,
        "check": " ".join(result.check) or None,
        "confidence": result.lowest,
        **{column or "value": flat.get(column) for column in columns.names},
        OTHER: other and json.dumps(other, ensure_ascii=False),
    }
    lowest: dict[str, float] = {}
    for pointer, field in result.confidence.items():
        column = columns.column_of(pointer)
        lowest[column] = min(field.p, lowest.get(column, 1.0))
    return {**found, **{_p_name(column): lowest.get(column) for column in columns.names}}


def _p_name(column: str) -> str:
    return P + (column or "value")


def _write_parquet(results: Iterable[Result], columns: Columns, path: Path) -> None:
    import pyarrow  # Lazy: an optional dependency
    from pyarrow.parquet import ParquetWriter

    types = _types(results, columns)
    fields = pyarrow.schema([pyarrow.field(name, kind) for name, (kind, _) in types.items()])
    with ParquetWriter(path, fields) as writer:
        for batch in _batches(results, columns):
            made = {
                name: pyarrow.array([convert(cells[name]) for cells in batch], kind)
                for name, (kind, convert) in types.items()
            }
            record: RecordBatch = pyarrow.record_batch(made, schema=fields)
            writer.write_batch(record)


def _batches(results: Iterable[Result], columns: Columns) -> Iterator[list[dict[str, JsonValue]]]:
    batch: list[dict[str, JsonValue]] = []
    for result in results:
        batch.append(cells_of(result, columns))
        if len(batch) == _BATCH_ROWS:
            yield batch
            batch = []
    if batch:
        yield batch


def _types(
    results: Iterable[Result], columns: Columns
) -> "dict[str, tuple[DataType, Callable[[JsonValue], object]]]":
    """Return each column's type, and a function that converts a cell to the type. A column whose values have
    different types becomes text.
    """
    import pyarrow  # Lazy: an optional dependency

    kinds: dict[str, set[str]] = {}
    for result in results:
        for name, value in cells_of(result, columns).items():
            if value is not None:
                kinds.setdefault(name, set()).add(_kind(value))
    found: dict[str, tuple[DataType, Callable[[JsonValue], object]]] = {}
    names = [*HEAD, *(column or "value" for column in columns.names), OTHER, *map(_p_name, columns.names)]
    for name in names:
        seen = kinds.get(name, set())
        if (
            name == "confidence"
            or name.startswith(P)
            or (seen and seen <= {"integer", "number"} and "number" in seen)
        ):
            found[name] = pyarrow.float64(), _as_float
        elif name == "page" or seen == {"integer"}:
            found[name] = pyarrow.int64(), partial(_same)
        elif seen == {"boolean"}:
            found[name] = pyarrow.bool_(), partial(_same)
        else:
            found[name] = pyarrow.string(), _as_text
    return found


def _kind(value: JsonValue) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer" if value in _INT64 else "text"
    return "number" if isinstance(value, float) else "text"


def _as_float(value: JsonValue) -> object:
    return None if value is None else float(text_of(value))


def _same(value: JsonValue) -> object:
    return value


def _as_text(value: JsonValue) -> object:
    return None if value is None else text_of(value).encode(errors="replace").decode()
