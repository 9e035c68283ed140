"""`mmengine embed`: computes vectors for texts and pictures and writes them to a file."""

import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmengine.cli.grouped import grouped
from mmengine.cli.loading import loading
from mmengine.cli.media_options import MediaUrls
from mmengine.cli.run_options import Model
from mmengine.errors import InvalidRequest

if TYPE_CHECKING:  # Heavy; loaded when the command runs.
    from mmengine.processing.fetch.fetcher import MediaFetcher
    from mmengine.serve.engine.engine import Engine
    from mmengine.serve.pooling.input_file import VectorInput
    from mmengine.serve.pooling.vector_file import Result

HELP = """Compute vectors of texts and pictures with an embedding model.

[bold]Examples[/bold]

  mmengine embed "a red square" "a blue circle" --model Qwen/Qwen3-Embedding-0.6B

  mmengine embed --images photos --model Qwen/Qwen3-VL-Embedding-2B --out vectors.jsonl

  mmengine embed --inputs texts.jsonl --model Qwen/Qwen3-Embedding-0.6B --dimensions 256 --out vectors.npy

""" + (
    'A line of an input file is a JSON string, or an object such as {"custom_id": "a", "text": "…", "image": '
    '"a.png"}; paths are relative to the file. A line of the output contains custom_id and embedding, or '
    "custom_id and error; .npy holds float32 rows in the order of the inputs. The same command continues an "
    "interrupted .jsonl file. Exit code 1 if an input has no vector."
)
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif")


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs to embed, options for the vectors, and the output file."""

    texts: Annotated[
        list[str] | None, typer.Argument(help="Texts.", show_default=False, metavar="TEXT...")
    ] = None
    inputs: Annotated[Path | None, typer.Option(help="File of inputs (JSON lines).")] = None
    images: Annotated[
        list[Path] | None,
        typer.Option(help="Picture, or folder of pictures; may be repeated.", metavar="PATH"),
    ] = None
    out: Annotated[
        Path | None, typer.Option(help="File for the vectors, .jsonl or .npy (default: print lines).")
    ] = None
    dimensions: Annotated[
        int | None, typer.Option(min=1, help="Number of values to keep of each vector (default: all).")
    ] = None
    instruction: Annotated[
        str | None, typer.Option(help="Description of the task, for instruction-aware models.")
    ] = None
    prompt_name: Annotated[str | None, typer.Option(help="One of the model's prompts, such as query.")] = None
    truncate_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Number of tokens after which a text is cut.")
    ] = None

    def listed(self) -> "list[VectorInput]":
        """Return the inputs. Raises InvalidRequest if a file cannot be read, or if there is no input."""
        from mmengine.serve.pooling.input_file import VectorInput, read_inputs  # Lazy: msgspec, numpy

        found = [VectorInput(str(number), text) for number, text in enumerate(self.texts or [])]
        found += [VectorInput(str(path), {"image": str(path)}) for path in self._pictures()]
        if self.inputs is not None:
            found += read_inputs(self.inputs)
        if not found:
            raise InvalidRequest('give a text, --images or --inputs, such as mmengine embed "a red square"')
        return found

    def _pictures(self) -> Iterator[Path]:
        for path in self.images or []:
            if not path.exists():
                raise InvalidRequest(f"--images {path}: no such file or folder")
            if not path.is_dir():
                yield path
                continue
            pictures = sorted(each for each in path.rglob("*") if each.suffix.lower() in PICTURES)
            if not pictures:
                raise InvalidRequest(f"--images {path}: the folder has no picture ({', '.join(PICTURES)})")
            yield from pictures


@grouped()
def embed(what: Inputs, model: Model, media: MediaUrls) -> None:
    listed, media_options = what.listed(), media.media_options()
    from mmengine.models.progress import weights_reported_to
    from mmengine.serve.engine.engine import Engine  # Lazy: torch
    from mmengine.serve.pooling.vector_file import open_vectors

    with closing(open_vectors(what.out, [each.custom_id for each in listed])) as vectors:
        missing = [index for index in range(len(listed)) if index not in vectors.written]
        if len(missing) < len(listed):
            print(f"mmengine: {len(listed) - len(missing)} of {len(listed)} vectors exist", file=sys.stderr)
        if missing:
            config = model.config(keeps_media=False, kept_of_log=[])
            with loading(model.model or "the included checkpoint") as progress:
                with weights_reported_to(progress):
                    engine = Engine(model.model, config=config, device=model.device, dtype=model.dtype)
                progress.loaded(engine.built)
            with engine:
                for index, result in _results(engine, what, [listed[n] for n in missing], media_options):
                    vectors.write(missing[index], result)
    if what.out is not None:
        print(f"{what.out}: {len(listed) - vectors.num_errors} vectors", file=sys.stderr)
    if vectors.num_errors:
        print(f"mmengine: {vectors.num_errors} of {len(listed)} inputs have no vector", file=sys.stderr)
        raise typer.Exit(1)


def _results(
    engine: "Engine",
    what: Inputs,
    listed: "list[VectorInput]",
    media_options: "dict[str, MediaFetcher] | None",
) -> "Iterator[tuple[int, Result]]":
    """Yield (index, vector or error) for each input. Shows a progress bar on a terminal."""
    from rich.console import Console
    from rich.progress import track

    results = engine.embed_each(
        [each.content for each in listed],
        dimensions=what.dimensions,
        instruction=what.instruction,
        prompt_name=what.prompt_name,
        truncate_prompt_tokens=what.truncate_prompt_tokens,
        media_options=None if media_options is None else dict(media_options),
    )
    console = Console(stderr=True)
    shown = console.is_terminal and (what.out is not None or not sys.stdout.isatty())
    yield from track(
        results, "embedding", total=len(listed), console=console, transient=True, disable=not shown
    )
