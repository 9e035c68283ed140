"""`mmengine extract`: reads the fields of many documents into a table."""

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mmengine.cli.grouped import grouped
from mmengine.cli.progress_bar import progress_bar
from mmengine.cli.run_options import Files, Model, read_schema
from mmengine.errors import ConfigError, InvalidRequest
from mmengine.extras import install_hint

if TYPE_CHECKING:  # Heavy; loaded when the command runs.
    from mmengine.config import EngineConfig
    from mmengine.core.resume import Resume
    from mmengine.serve.engine.engine import Engine
    from mmengine.serve.extraction.documents import Document
    from mmengine.serve.extraction.pages import PagePainter
    from mmengine.serve.extraction.plan import Job, WorkFolder
    from mmengine.serve.extraction.results import Results

HELP = """Read the fields of many pictures and PDF documents into a table.

[bold]Examples[/bold]

  mmengine extract receipts --schema receipt.json --out receipts.csv --review review.html

  mmengine extract a.pdf b.pdf --schema invoice.json --out a.parquet --model Qwen/Qwen3-VL-4B-Instruct

  mmengine extract forms.pdf --per page --schema form.json --out forms.jsonl --min-confidence 0.95

""" + (
    "A row has document, page, status, error, check and the fields of the schema. status is ok; check, if a "
    "field's probability is below --min-confidence (check names the fields); invalid, if the answer does not "
    "follow the schema; error, if there is no answer. A column of .csv and .parquet is the JSON pointer of a "
    "property; arrays are JSON text. The same command continues after an interruption: the work folder has "
    "the log and the answers. A document that cannot be read becomes a row with its error, and the others "
    "continue. The first Ctrl-C finishes running documents, the second stops. Exit code: 0 if each row has a "
    "valid answer, 1 if any is invalid or has an error, 130 if the command was stopped."
)
MAX_PAGES = 1024  # Maximum number of pictures in a prompt.


@dataclass(frozen=True, slots=True)
class Extraction:
    """The options of an extraction, other than the model's options."""

    documents: Annotated[
        list[Path],
        typer.Argument(
            help="Pictures, PDF documents, and folders of them.", show_default=False, metavar="PATH..."
        ),
    ]
    schema: Annotated[
        Path, typer.Option(help="File with the JSON schema of a document's data.", show_default=False)
    ]
    out: Annotated[Path, typer.Option(help="Table: .jsonl, .csv or .parquet.", show_default=False)]
    per: Annotated[
        Literal["document", "page"],
        typer.Option(help="Row for each document (all its pages in one prompt), or for each page."),
    ] = "document"
    prompt: Annotated[
        str,
        typer.Option(
            help="Question for each document; {schema} stands for the schema.",
            show_default="asks for the data by the schema",
        ),
    ] = ""
    min_confidence: Annotated[
        float, typer.Option(min=0, max=1, help="Probability below which a field is marked.")
    ] = 0.9
    review: Annotated[
        Path | None,
        typer.Option(help="HTML page for checking: pictures beside their fields, least certain first."),
    ] = None
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens of an answer.")] = 1024
    min_pixels: Annotated[
        int | None, typer.Option(help="Minimum pixels per picture; smaller ones are enlarged.")
    ] = None
    max_pixels: Annotated[
        int | None, typer.Option(help="Maximum pixels per picture; larger ones are shrunk.")
    ] = None
    dpi: Annotated[int, typer.Option(min=18, max=600, help="Pixels per inch of PDF pages.")] = 150
    max_pages: Annotated[
        int, typer.Option(min=1, max=MAX_PAGES, help="Maximum pages of a PDF document; longer ones fail.")
    ] = 100
    max_bytes: Annotated[
        int, typer.Option(min=1, help="Maximum size of a file in bytes; larger ones fail.")
    ] = 64 * 2**20
    work: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the log, the answers and drawn pages.", show_default="OUT with .work added"
        ),
    ] = None

    @property
    def work_folder(self) -> Path:
        return self.work or self.out.with_name(self.out.name + ".work")

    def schema_text(self) -> bytes:
        """Return the schema's JSON text. Raises InvalidRequest for a file that cannot be read, and for a
        schema that cannot be enforced.
        """
        from mmengine.structured_output.request.spec import grammar_of  # Lazy: not needed for help

        found = read_schema(self.schema)
        grammar_of({"type": "json_schema", "json_schema": {"schema": found}}, None)
        return found.strip()

    def job(self, model: Model) -> "Job":
        """Return the extraction's settings. Raises InvalidRequest or ConfigError for invalid settings."""
        from mmengine.serve.extraction.plan import PROMPT, Job

        given = {field.name: getattr(model, field.name) for field in fields(model)}
        return Job(
            schema=self.schema_text(),
            prompt=self.prompt or PROMPT,
            per=self.per,
            max_tokens=self.max_tokens,
            min_pixels=self.min_pixels,
            max_pixels=self.max_pixels,
            dpi=self.dpi,
            max_pages=self.max_pages,
            max_bytes=self.max_bytes,
            adapter=next(iter(model.loras())) if len(model.lora or ()) == 1 else "",
            model={name: str(value) for name, value in given.items()},
        )


@grouped()
def extract(what: Extraction, model: Model) -> None:
    from mmengine.cli import supervisor  # Lazy: help needs no processes
    from mmengine.serve.extraction.documents import find_documents
    from mmengine.serve.extraction.plan import WorkFolder
    from mmengine.serve.extraction.table import check_format

    check_format(what.out)
    job = what.job(model)
    documents = find_documents(what.documents, what.max_bytes)
    _check_files(what, documents)
    # Documents are untrusted, so their pictures are decoded in separate processes with limits.
    config = model.config(keeps_media=True, kept_of_log=[], unless_set=("media_decoding=processes",))
    work = WorkFolder(what.work_folder, what.per)
    if not supervisor.is_supervised():
        work.begin(job, documents)
        raise typer.Exit(supervisor.supervise(sys.argv[1:], lambda: _num_bytes(work.answers)))
    supervisor.obey_supervisor()
    raise typer.Exit(_run(what, model, job, documents, config, work))


def _check_files(what: Extraction, documents: "list[Document]") -> None:
    """Raise ConfigError if an output would overwrite an input or another output. Also raise ConfigError if an
    output folder or a library is missing.
    """
    if any(each.is_pdf and not each.error for each in documents):
        try:
            import pypdfium2  # noqa: F401 Lazy: only PDF documents need it
        except ImportError:
            hint = install_hint("extract")
            raise ConfigError(f"PDF documents need pypdfium2, which is not installed: {hint}") from None
    inputs = {os.path.realpath(path) for path in (what.schema, *(each.path for each in documents))}
    outputs = [path for path in (what.out, what.review) if path is not None]
    for path in outputs:
        if os.path.realpath(path) in inputs:
            raise ConfigError(f"{path} is an input; name another file for the output")
        if not path.parent.is_dir():
            raise ConfigError(f"{path}: there is no folder {path.parent}")
    if what.review is not None and os.path.realpath(what.review) == os.path.realpath(what.out):
        raise ConfigError("--review and --out name the same file")


def _num_bytes(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _run(
    what: Extraction,
    model: Model,
    job: "Job",
    documents: "list[Document]",
    config: "EngineConfig",
    work: "WorkFolder",
) -> int:
    """Plan the extraction, answer its requests, and write the table. Return the exit code."""
    from mmengine.cli.batch import run_batch_file  # Lazy: numpy, msgspec
    from mmengine.cli.run import load_engine
    from mmengine.cli.supervisor import INTERRUPTED
    from mmengine.serve.extraction.boxes import has_boxes
    from mmengine.serve.extraction.pages import PagePainter
    from mmengine.serve.extraction.results import Results

    painter = partial(PagePainter, config, what.dpi, what.max_pages)
    if not work.is_planned:
        with progress_bar("reading documents", len(documents)) as bar:
            work.plan(job, documents, painter(), bar.advance)
    if _num_bytes(work.requests):
        load = partial(load_engine, model, Files(), config, True)
        opened: list[Engine] = []

        def make_engine(resume: "Resume | None") -> "Engine":
            opened.append(load(work.log, resume))
            return opened[-1]

        code = run_batch_file(work.requests, work.answers, work.log, make_engine)
        if code == INTERRUPTED:
            print("mmengine: the same command continues and writes the table", file=sys.stderr)
            return code
        if has_boxes(job.schema) and not work.boxes.exists():
            results = Results(work, job.schema, what.min_confidence)
            with ExitStack() as loaded:
                engine = opened[-1] if opened else loaded.enter_context(load(None, None))
                _write_boxes(engine, results, job, work)
    return _write(what, job, work, painter)


def _write_boxes(engine: "Engine", results: "Results", job: "Job", work: "WorkFolder") -> None:
    """Convert the answers' boxes to picture coordinates, and write them to the work folder. Print a warning
    if the model's box unit is unknown.
    """
    from mmengine.serve.extraction.boxes import write_boxes  # Lazy: torch

    try:
        write_boxes(engine, results, job.schema, work.path, work.boxes)
    except InvalidRequest as error:
        print(f"mmengine: no boxes: {error}", file=sys.stderr)


def _write(what: Extraction, job: "Job", work: "WorkFolder", painter: "Callable[[], PagePainter]") -> int:
    """Write the table and, if requested, the review page. Return the exit code."""
    from collections import Counter  # Lazy, like all imports here: help needs none of them

    from mmengine.serve.extraction.results import STATUSES, Results
    from mmengine.serve.extraction.review import write_review
    from mmengine.serve.extraction.table import write_table

    results = Results(work, job.schema, what.min_confidence)
    counts = Counter(result.status for result in results)
    write_table(results, job.schema, what.out)
    shown = ", ".join(f"{counts[name]} {name}" for name in STATUSES if counts[name])
    print(f"{what.out}: {sum(counts.values())} rows: {shown}")
    if what.review is not None:
        with closing(painter()) as opened:
            write_review(results, work.path, opened, what.min_confidence, what.review)
        print(f"{what.review}: open it in a browser to check the rows")
    return 1 if counts["error"] or counts["invalid"] else 0
