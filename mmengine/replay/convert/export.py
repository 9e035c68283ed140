"""Exports a log as a Mooncake trace or as CSV tables, for simulators and spreadsheets."""

import csv
import hashlib
import io
import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from mmengine.core.state.blocks import block_extras
from mmengine.core.state.request_state import request_of
from mmengine.events import vocabulary as ev
from mmengine.replay.checked_log import CheckedLog
from mmengine.replay.findings import Findings
from mmengine.replay.queries.summaries import RequestLine, StepLine, request_lines, step_lines
from mmengine.replay.timeline import fold, taken_tokens

MOONCAKE_BLOCK = 512  # Number of tokens per hash id.


def mooncake_lines(folder: Path, findings: Findings | None = None) -> Iterator[str]:
    """Yield a JSON line per request, ordered by arrival: {"timestamp" (ms), "input_length", "output_length",
    "hash_ids"}.

    `hash_ids` has an id per block of 512 tokens. Two blocks have equal ids if the tokens, media and salt of
    the whole prefix up to the block's end are equal. Ids count from 0, so they reveal nothing about the
    prompts. Requests whose arrival was deleted with the log's beginning are omitted. `findings`: see
    CheckedLog. Raises the same errors as mmengine.replay.verify.

    The Mooncake traces (FAST'25) have this format. `mmengine simulate --format mooncake` reads the format.
    """
    lengths = _output_lengths(folder, findings)
    ids: dict[bytes, int] = {}
    began, number = -1, 0
    log = CheckedLog(folder)
    for record in log:
        began = record.mono_ns if began < 0 else began
        if isinstance(record.event, ev.Queued) and number < len(lengths):
            line = {
                "timestamp": (record.mono_ns - began) // 10**6,
                "input_length": len(record.event.prompt + record.event.outputs) // 4,
                "output_length": lengths[number],
                "hash_ids": _hash_ids(record.event, ids),
            }
            number += 1
            yield json.dumps(line)


def _output_lengths(folder: Path, findings: Findings | None) -> list[int]:
    """Return the number of tokens that each request generated (at least 1), ordered by arrival. The list ends
    where the log cannot be read further.
    """
    lengths: list[int] = []
    number_of: dict[str, int] = {}
    log = CheckedLog(folder, findings=findings)
    with log.naming():
        for state, record in fold(log):
            match record.event:
                case ev.Queued(request_id=name):
                    number_of[name] = len(lengths)
                    lengths.append(0)
                case ev.Executed():
                    for row, tokens in taken_tokens(state, record.event):
                        name = state.requests_by_row[row].request.request_id
                        # Requests that are missing here arrived before the log's first record.
                        if name in number_of:
                            lengths[number_of[name]] += len(tokens)
                case ev.Finished(request_id=name):
                    number_of.pop(name, None)
    return [max(1, length) for length in lengths]


def _hash_ids(event: ev.Queued, ids: dict[bytes, int]) -> list[int]:
    tokens, found, content = np.frombuffer(event.prompt + event.outputs, np.int32), [], b""
    count = -(-len(tokens) // MOONCAKE_BLOCK)
    extras = block_extras(request_of(event), 0, count, MOONCAKE_BLOCK)
    for number in range(count):
        own = tokens[number * MOONCAKE_BLOCK : (number + 1) * MOONCAKE_BLOCK].astype("<i4").tobytes()
        extra = extras.get(number, b"")
        content = hashlib.blake2b(
            content + len(own).to_bytes(4, "little") + own + extra, digest_size=16
        ).digest()
        found.append(ids.setdefault(content, len(ids)))
    return found


def csv_lines(folder: Path, *, steps: bool, findings: Findings | None = None) -> Iterator[str]:
    """Yield the lines of a CSV table: a header, and a line per request. With `steps`, there is a line per
    step instead. Times are in ns.

    If a spreadsheet would treat a text as a formula, an apostrophe is put before the text. `findings`: see
    CheckedLog. Raises the same errors as mmengine.replay.verify.
    """
    kind = StepLine if steps else RequestLine
    names = [field.name for field in fields(kind)]
    yield _csv_line(names)
    for line in step_lines(folder, findings) if steps else request_lines(folder, findings):
        yield _csv_line([_cell(getattr(line, name)) for name in names])


def _csv_line(cells: list[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(cells)
    return text.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, tuple):
        value = " ".join(value)
    if isinstance(value, str):
        value = "".join(c if c.isprintable() else "\ufffd" for c in value)
        return f"'{value}" if value.startswith(("=", "+", "-", "@")) else value
    return value
