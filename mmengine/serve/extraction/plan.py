"""Turns documents into a request file for `run_batch`, in a work folder.

The work folder has extract.json (the options, and a digest of the documents' names, sizes and times),
documents.jsonl (a line per document), pages/ (the rendered pages), requests.jsonl, answers.jsonl, boxes.jsonl
and log/. If requests.jsonl exists, the plan is complete: the same command, run again, computes only the
missing answers.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Literal

import msgspec

from mmengine.errors import InvalidRequest, MMEngineError
from mmengine.events.file_system import write_whole
from mmengine.serve.extraction.documents import MANIFEST, Document
from mmengine.serve.extraction.pages import PagePainter

Per = Literal["document", "page"]
SCHEMA = "{schema}"  # The placeholder for the schema in a prompt.
PROMPT = "Read the document and return its data as JSON that follows this JSON schema: {schema}"


class Job(msgspec.Struct, frozen=True):
    """The options of an extraction. `model`: options that identify the model."""

    schema: bytes
    prompt: str
    per: Per
    max_tokens: int
    min_pixels: int | None
    max_pixels: int | None
    dpi: int
    max_pages: int
    max_bytes: int
    adapter: str
    model: dict[str, str]


class Planned(msgspec.Struct, frozen=True):
    """A planned document. `pictures`: paths relative to the work folder; a PDF has a picture per page."""

    document: str
    pictures: list[str]
    error: str = ""


class Row(msgspec.Struct, frozen=True):
    """A row of the result table. `request`: the request's custom_id, or "" without a request. `page`: the
    page number from 1, or None for a whole document.
    """

    document: str
    page: int | None
    pictures: list[str]
    request: str
    error: str = ""


class WorkFolder:
    """The folder with an extraction's plan, answers and log."""

    def __init__(self, path: Path, per: Per) -> None:
        self.path, self._per = path, per
        self.requests, self.answers, self.log = path / "requests.jsonl", path / "answers.jsonl", path / "log"
        self.boxes = path / "boxes.jsonl"
        self._documents = path / "documents.jsonl"

    @property
    def is_planned(self) -> bool:
        return self.requests.exists()

    def begin(self, job: Job, documents: list[Document]) -> None:
        """Create the folder. Raises InvalidRequest if the folder belongs to another extraction."""
        manifest = self.path / MANIFEST
        wanted = _described(job, documents)
        if manifest.exists():
            self._check(manifest, wanted)
            return
        # A process that was killed in `write_whole` may leave an incomplete manifest.
        part = f"{MANIFEST}.part"
        if self.path.exists() and any(each.name != part for each in self.path.iterdir()):
            raise InvalidRequest(f"{self.path} is not the work folder of an extraction; name another --work")
        self.path.mkdir(parents=True, exist_ok=True)
        write_whole(manifest, msgspec.json.encode(wanted))

    def _check(self, manifest: Path, wanted: dict[str, object]) -> None:
        try:
            found = msgspec.json.decode(manifest.read_bytes(), type=dict[str, object])
        except msgspec.MsgspecError as error:
            raise InvalidRequest(f"{manifest} cannot be read: {error}") from None
        changed = sorted(name for name in {**found, **wanted} if found.get(name) != wanted.get(name))
        if changed:
            raise InvalidRequest(
                f"{self.path} holds an extraction with other values of {', '.join(changed)}. Delete that "
                "folder to begin again, or name another --out or --work"
            )

    def plan(
        self, job: Job, documents: list[Document], painter: PagePainter, progress: Callable[[], None]
    ) -> None:
        """Render the pages of PDF documents, and write the request file. Calls `progress` for each
        document.
        """
        found: list[Planned] = []
        (self.path / "pages").mkdir(exist_ok=True)
        with closing(painter), ThreadPoolExecutor(painter.num_workers) as pool:
            for planned in pool.map(lambda each: self._planned(painter, *each), enumerate(documents)):
                found.append(planned)
                progress()
        write_whole(self._documents, b"".join(msgspec.json.encode(each) + b"\n" for each in found))
        lines = [_request(job, row) for row in self.rows() if row.request]
        write_whole(self.requests, b"".join(lines))

    def _planned(self, painter: PagePainter, number: int, document: Document) -> Planned:
        if document.error:
            return Planned(document.name, [], document.error)
        if not document.is_pdf:
            return Planned(document.name, [os.path.relpath(document.path.resolve(), self.path.resolve())])
        try:
            pages = painter.draw(document, self.path / "pages" / f"{number + 1:06}")
        except MMEngineError as error:
            return Planned(document.name, [], str(error))
        return Planned(document.name, [os.path.relpath(page, self.path) for page in pages])

    def rows(self) -> Iterator[Row]:
        """Yield the table's rows, ordered by document and page."""
        decode = msgspec.json.Decoder(Planned).decode
        with self._documents.open("rb") as file:
            for number, line in enumerate(file, 1):
                planned = decode(line)
                name, pictures = planned.document, planned.pictures
                if planned.error:
                    yield Row(name, None, [], "", planned.error)
                elif self._per == "document":
                    yield Row(name, None, pictures, str(number))
                else:
                    for page, picture in enumerate(pictures, 1):
                        yield Row(name, page, [picture], f"{number}.{page}")


def _described(job: Job, documents: list[Document]) -> dict[str, object]:
    """Return the values that identify an extraction, by option name."""
    digest = hashlib.sha256(msgspec.json.encode(documents)).hexdigest()
    fields = msgspec.structs.asdict(job)
    schema, model = fields.pop("schema"), fields.pop("model")
    return {**fields, **model, "schema": hashlib.sha256(schema).hexdigest(), "documents": digest}


def _request(job: Job, row: Row) -> bytes:
    sizes = {"min_pixels": job.min_pixels, "max_pixels": job.max_pixels}
    given = {name: pixels for name, pixels in sizes.items() if pixels is not None}
    parts: list[dict[str, object]] = [{"type": "image", "image": path, **given} for path in row.pictures]
    text = job.prompt.replace(SCHEMA, job.schema.decode())
    parts.append({"type": "text", "text": text})
    # A request must be a single line. Valid JSON has line breaks only between JSON tokens.
    schema = msgspec.Raw(job.schema.replace(b"\n", b" ").replace(b"\r", b" "))
    line = {
        "custom_id": row.request,
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": job.max_tokens,
        "temperature": 0.0,
        **({"adapter": job.adapter} if job.adapter else {}),
        "response_format": {
            "type": "json_schema",
            "field_confidence": True,
            "json_schema": {"name": "document", "schema": schema},
        },
    }
    return msgspec.json.encode(line) + b"\n"
