"""Writes an HTML page on which a person checks an extraction: each row's pictures beside its fields. Rows
with errors or invalid answers come first, then the least certain rows.

File names, answers and pictures are untrusted. Therefore all texts are escaped, and decoder processes
re-encode the pictures. The page's content security policy blocks scripts and network access.
"""

import base64
import hashlib
import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from html import escape
from importlib.resources import files
from itertools import islice
from pathlib import Path

from msgspec import UnsetType

from mmengine.events.file_system import replacing
from mmengine.serve.extraction.columns import leaves, text_of
from mmengine.serve.extraction.pages import PagePainter
from mmengine.serve.extraction.results import STATUSES, JsonValue, PlacedBox, Result
from mmengine.structured_output.field_confidence.fields import FieldConfidence
from mmengine.structured_output.field_confidence.others import OtherValue

MAX_ROWS = 500  # Maximum number of rows on the page. The last rows in the page's order are left out.
MAX_PICTURES = 8  # Maximum number of pictures for a row.
MAX_FIELDS = 200  # Maximum number of fields for a row.
MAX_PICTURE_BYTES = 64 * 2**20  # Maximum total size of the page's pictures, in bytes.
MIN_OTHER_P = 0.01  # Minimum probability for another possible value to be shown.
_MAX_OTHERS = 3
_AHEAD = 16  # Maximum number of rows whose pictures are decoded in advance.


def write_review(
    results: Iterable[Result], work: Path, painter: PagePainter, min_confidence: float, out: Path
) -> int:
    """Write the page, and return how many rows it has. `work`: the folder to which pictures are relative."""
    counts: Counter[str] = Counter()

    def counted() -> Iterator[Result]:
        for result in results:
            counts[result.status] += 1
            yield result

    rows = heapq.nsmallest(MAX_ROWS, counted(), key=_order)
    with replacing(out) as part, part.open("w", encoding="utf-8", errors="replace") as file:
        file.write(_head(counts, len(rows)))
        for result, pictures in _with_pictures(rows, work, painter):
            file.write(_card(result, pictures, min_confidence))
        file.write("</main>\n</body>\n</html>\n")
    return len(rows)


def _order(result: Result) -> tuple[int, float]:
    """Return the key by which rows are sorted: first errors, then invalid answers, then the least certain
    rows.
    """
    place = {"error": 0, "invalid": 1}.get(result.status, 2)
    return place, 2.0 if result.lowest is None else result.lowest


def _head(counts: Counter[str], num_shown: int) -> str:
    here = files("mmengine.serve.extraction")
    style = (here / "review.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )
    total = sum(counts.values())
    summary = f"{total:,} rows: " + ", ".join(f"{counts[name]:,} {name}" for name in STATUSES if counts[name])
    if num_shown < total:
        summary += (
            f"; the page shows only {num_shown:,} rows: first errors, then invalid and uncertain answers"
        )
    html = (here / "review.html").read_text(encoding="utf-8")
    for name, text in (("{POLICY}", policy), ("<!--STYLE-->", style), ("<!--SUMMARY-->", summary)):
        html = html.replace(name, text)
    return html


def _with_pictures(
    rows: list[Result], work: Path, painter: PagePainter
) -> Iterator[tuple[Result, list[bytes | None]]]:
    """Yield each row with small copies of its pictures. A copy is None for a picture that is left out."""
    num_bytes = 0

    def copies(result: Result) -> list[bytes | None]:
        names = result.pictures[:MAX_PICTURES]
        return [painter.copy(work / name) if num_bytes < MAX_PICTURE_BYTES else None for name in names]

    remaining = iter(rows)
    with ThreadPoolExecutor(painter.num_workers) as pool:
        while batch := list(islice(remaining, _AHEAD)):
            for result, pictures in zip(batch, pool.map(copies, batch), strict=True):
                for place, picture in enumerate(pictures):
                    size = 0 if picture is None else len(picture)
                    if num_bytes + size > MAX_PICTURE_BYTES:
                        pictures[place], size = None, 0
                    num_bytes += size
                yield result, pictures


def _card(result: Result, pictures: list[bytes | None], min_confidence: float) -> str:
    page = "" if result.page is None else f" <span>page {result.page}</span>"
    name = f"<bdi>{escape(result.document)}</bdi>"
    error = f'<p class="error"><bdi>{escape(result.error)}</bdi></p>\n' if result.error else ""
    boxes = _boxes(result.boxes)
    images = "\n".join(_image(picture, number, boxes) for number, picture in enumerate(pictures, 1))
    if left_out := len(result.pictures) - len(pictures):
        images += f'\n<p class="left-out">{left_out} more pages</p>'
    status = result.status
    return (
        f'<article class="{status}">\n<h2>{name}{page} <span class="badge">{status}</span></h2>\n'
        f'<div class="pictures">\n{images}\n</div>\n<div>\n{error}{_fields(result, min_confidence)}</div>\n'
        "</article>\n"
    )


def _image(picture: bytes | None, number: int, boxes: str) -> str:
    if picture is None:
        return f'<p class="left-out">picture {number} is left out</p>'
    data = base64.b64encode(picture).decode()
    image = f'<img loading="lazy" alt="picture {number}" src="data:image/jpeg;base64,{data}">'
    return f'<div class="picture">{image}{boxes}</div>'


def _boxes(boxes: dict[str, PlacedBox]) -> str:
    """Return an SVG drawing of the boxes, which the page shows over the row's only picture."""
    rects = []
    for pointer, box in boxes.items():
        if box.shown is not None:
            left, top, right, bottom = box.shown
            place = f'x="{left:.5f}" y="{top:.5f}" width="{right - left:.5f}" height="{bottom - top:.5f}"'
            rects.append(f"<rect {place}><title>{escape(pointer)}</title></rect>")
    return f'<svg viewBox="0 0 1 1" preserveAspectRatio="none">{"".join(rects)}</svg>' if rects else ""


def _fields(result: Result, min_confidence: float) -> str:
    """Return the table of a row's fields, the least certain first."""
    values = dict(islice(leaves(result.value), MAX_FIELDS)) if result.text else {}
    names = sorted(
        islice(dict.fromkeys((*result.check, *values)), MAX_FIELDS),
        key=lambda pointer: result.confidence[pointer].p if pointer in result.confidence else 2.0,
    )
    if not names:
        return ""
    rows = [_field(name, values, result.confidence.get(name), min_confidence) for name in names]
    return (
        "<table>\n<tr><th>field</th><th>value</th><th>probability</th></tr>\n" + "".join(rows) + "</table>\n"
    )


def _field(
    pointer: str, values: dict[str, JsonValue], field: FieldConfidence | None, min_confidence: float
) -> str:
    value = values.get(pointer)
    shown = "null" if pointer in values and value is None else text_of(value)
    kind = ' class="doubt"' if field is not None and field.p < min_confidence else ""
    p, others = "", ""
    if field is not None:
        meter = f'<meter min="0" max="1" low="{min_confidence}" optimum="1" value="{field.p:.4f}"></meter>'
        p = f"{field.p:.3f}{meter}"
        likely = [other for other in field.others[:_MAX_OTHERS] if other.p >= MIN_OTHER_P]
        texts = [f"{_other_text(other)} ({other.p:.2f})" for other in likely]
        others = f'<span class="others">or <bdi>{escape("; ".join(texts))}</bdi></span>' if texts else ""
    return (
        f"<tr{kind}><td><bdi>{escape(pointer or '(value)')}</bdi></td>"
        f'<td class="value"><bdi>{escape(shown)}</bdi>{others}</td><td class="p">{p}</td></tr>\n'
    )


def _other_text(other: OtherValue) -> str:
    if isinstance(other.begins, str):
        return f"{other.begins}…"
    return "null" if other.value is None or isinstance(other.value, UnsetType) else text_of(other.value)
