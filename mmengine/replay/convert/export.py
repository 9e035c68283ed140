"""A log in forms that other programs read: a Mooncake trace, and tables as CSV."""

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
from mmengine.replay.ask.show import RequestLine, StepLine, request_lines, step_lines
from mmengine.replay.checked import CheckedLog
from mmengine.replay.timeline import fold, taken_tokens

MOONCAKE_BLOCK = 512  # tokens behind one hash id


def mooncake_lines(folder: Path) -> Iterator[str]:
    """One line a request, in order of arrival: {"timestamp" (ms), "input_length", "output_length",
    "hash_ids"}. Equal ids are equal beginnings: of tokens, media and salt up to the end of that block of
    512. Ids count from 0, so nothing of the prompts is in them. Requests whose arrival is gone with the
    beginning of the log are left out. Raises what `verify` raises.

    The format is that of the Mooncake traces (FAST'25); `mmengine simulate --format mooncake` reads it.
    """
    lengths = _output_lengths(folder)
    ids: dict[bytes, int] = {}
    began, number = -1, 0
    log = CheckedLog(folder)
    for record in log:
        began = record.mono_ns if began < 0 else began
        if isinstance(record.event, ev.Queued):
            line = {
                "timestamp": (record.mono_ns - began) // 10**6,
                "input_length": len(record.event.prompt + record.event.outputs) // 4,
                "output_length": lengths[number],
                "hash_ids": _hash_ids(record.event, ids),
            }
            number += 1
            yield json.dumps(line)


def _output_lengths(folder: Path) -> list[int]:
    """Tokens that each request was given, in order of arrival; at least 1."""
    lengths: list[int] = []
    number_of: dict[str, int] = {}
    log = CheckedLog(folder)
    with log.naming():
        for state, record in fold(log):
            match record.event:
                case ev.Queued(request_id=name):
                    number_of[name] = len(lengths)
                    lengths.append(0)
                case ev.Executed():
                    for row, tokens in taken_tokens(state, record.event):
                        name = state.requests_by_row[row].request.request_id
                        if name in number_of:  # else it came before what the log holds
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


def csv_lines(folder: Path, *, steps: bool) -> Iterator[str]:
    """A table with a header, one line a request, or with `steps` one a step; times in ns. Text that a
    spreadsheet would take for a formula begins with an apostrophe. Raises what `verify` raises."""
    kind = StepLine if steps else RequestLine
    names = [field.name for field in fields(kind)]
    yield _csv_line(names)
    for line in step_lines(folder) if steps else request_lines(folder):
        yield _csv_line([_cell(getattr(line, name)) for name in names])


def _csv_line(cells: list[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(cells)
    return text.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, str):
        value = "".join(c if c.isprintable() else "\ufffd" for c in value)
        return f"'{value}" if value.startswith(("=", "+", "-", "@")) else value
    return value
