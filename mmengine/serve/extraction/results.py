"""Combines an extraction's planned rows with their answers, and flags doubtful fields and invalid answers."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from mmengine.serve.extraction.plan import Row, WorkFolder
from mmengine.serve.prompt.request_lines import read_head
from mmengine.structured_output.field_confidence.fields import FieldConfidence
from mmengine.structured_output.json_schema.validation import TOO_LARGE, find_violation

JsonValue = None | bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"]
Status = Literal["ok", "check", "invalid", "error"]
STATUSES: tuple[Status, ...] = ("ok", "check", "invalid", "error")
CUT = "the answer ended before it was complete ({}); raise --max-tokens"


class PlacedBox(msgspec.Struct, frozen=True):
    """A box in a picture. `pixels`: left, top, right and bottom in the stored picture, clipped to the
    picture. `shown`: the box in fractions of the upright picture. `pixels` and `shown` are None if the
    answer's value is no box. `problem`: why the value is wrong, or "".
    """

    pixels: tuple[float, float, float, float] | None
    shown: tuple[float, float, float, float] | None
    problem: str = ""


class RowBoxes(msgspec.Struct, frozen=True):
    """The boxes in the answer to a request, by JSON pointer."""

    request: str
    boxes: dict[str, PlacedBox]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table with its answer.

    `status`: "ok"; "check" if a field is doubtful; "invalid" if the answer does not follow the schema;
    "error" if there is no answer. `check`: the JSON pointers of the doubtful fields, the least certain first.
    `text`: the JSON text of `value`, or "" without a value. `confidence`: each field's confidence by JSON
    pointer. `pictures`: paths relative to the work folder. `request`: the custom_id of the row's request.
    """

    document: str
    page: int | None
    status: Status
    error: str = ""
    check: list[str] = []
    value: JsonValue = None
    text: str = ""
    confidence: dict[str, FieldConfidence] = {}
    pictures: list[str] = []
    request: str = ""
    boxes: dict[str, PlacedBox] = {}

    @property
    def lowest(self) -> float | None:
        """The lowest probability among the fields, or None without fields."""
        return min((field.p for field in self.confidence.values()), default=None)


class _Answer(msgspec.Struct):
    text: str = ""
    content: str | None = None  # The answer's text after the reasoning.
    finish_reason: str = ""
    field_confidence: dict[str, FieldConfidence] | None = None
    error: str = ""


_decode_answer = msgspec.json.Decoder(_Answer).decode


class Results:
    """Iterates over a work folder's results in table order. Reads the answers from disk each time, so they
    need not fit into memory.
    """

    def __init__(self, work: WorkFolder, schema: bytes, min_confidence: float) -> None:
        self._work, self._schema, self._min_confidence = work, json.loads(schema), min_confidence
        self._offsets = _answer_offsets(work.answers) if work.answers.exists() else {}
        lines = work.boxes.read_bytes().splitlines() if work.boxes.exists() else ()
        found = (msgspec.json.decode(line, type=RowBoxes) for line in lines)
        self._boxes = {each.request: each.boxes for each in found}

    def __iter__(self) -> Iterator[Result]:
        if not self._offsets:
            yield from (self._result(row, None) for row in self._work.rows())
            return
        with self._work.answers.open("rb") as file:
            for row in self._work.rows():
                offset = self._offsets.get(row.request)
                if offset is None:
                    yield self._result(row, None)
                    continue
                file.seek(offset)
                yield self._result(row, _read_answer(file.readline()))

    def _result(self, row: Row, answer: _Answer | None) -> Result:
        error = row.error or ("the request has no answer" if answer is None else answer.error)
        if error or answer is None:
            return _row(row, "error", error)
        found = answer.field_confidence or {}
        check = [pointer for pointer, field in found.items() if field.p < self._min_confidence]
        check.sort(key=lambda pointer: found[pointer].p)
        made = _row(row, "check" if check else "ok")
        made = msgspec.structs.replace(
            made, check=check, confidence=found, boxes=self._boxes.get(row.request, {})
        )
        if answer.finish_reason in ("length", "repetition"):
            return _invalid(made, CUT.format(answer.finish_reason))
        text = answer.text if answer.content is None else answer.content
        try:
            value: JsonValue = json.loads(text, parse_float=_number)
        except (ValueError, RecursionError):
            return _invalid(made, "the answer is not JSON")
        made = msgspec.structs.replace(made, value=value, text=text)
        violation = find_violation(self._schema, text)
        return _invalid(made, violation) if violation and violation != TOO_LARGE else made


def _row(row: Row, status: Status, error: str = "") -> Result:
    return Result(
        document=row.document,
        page=row.page,
        status=status,
        error=error,
        pictures=row.pictures,
        request=row.request,
    )


def _invalid(result: Result, error: str) -> Result:
    return msgspec.structs.replace(result, status="invalid", error=error)


def _number(text: str) -> float | str:
    """Return a number, or its text if the number is too large for a float."""
    return value if math.isfinite(value := float(text)) else text


def _read_answer(line: bytes) -> _Answer:
    try:
        return _decode_answer(line)
    except msgspec.DecodeError:  # An escaped lone surrogate, which msgspec refuses.
        return msgspec.convert(json.loads(line), _Answer)


def _answer_offsets(path: Path) -> dict[str, int]:
    """Return the byte offset of each answer's line, by its custom_id. An incomplete last line is left out."""
    found: dict[str, int] = {}
    offset = 0
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                found[str(read_head(line).custom_id)] = offset
            offset += len(line)
    return found
