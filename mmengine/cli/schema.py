"""`mmengine schema`: checks, without a model, whether JSON schemas can be enforced."""

from pathlib import Path
from typing import Annotated

import typer

from mmengine.cli.commands import Command, Group
from mmengine.cli.logs.printing import Json
from mmengine.errors import InvalidRequest

CHECK_HELP = (
    "Check whether a JSON schema can be enforced, and how exactly.\n\n"
    "[bold]exact[/bold]: answers are the values that the schema describes. [bold]approximated[/bold]: "
    "answers are some of these values, and the report lists the missing ones. [bold]refused[/bold]: with the "
    "keyword, its JSON pointer and the reason. Values that only the bounds and the key order exclude are "
    "listed beside an exact verdict.\n\n"
    "PATH is a file, a folder (its .json files) or - for standard input. A file may contain a schema, a "
    "response_format, or an object with the key schema.\n\n"
    "Exit code: 0 if all schemas are accepted, 1 if any is refused, 2 if any cannot be read.\n\n"
    "[bold]Examples[/bold]\n\n  mmengine schema check invoice.json\n\n"
    "  mmengine schema check schemas/ --json\n\n"
    "  mmengine schema check schemas/ --tokenizer Qwen3-VL-2B-Instruct"
)
schema_app = typer.Typer(
    cls=Group,
    help="Check JSON schemas. Needs neither a model nor a GPU.",
    epilog="Start with: mmengine schema check FILE.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)


@schema_app.callback()
def schema() -> None:
    """Do nothing. The callback makes typer treat its only command as a subcommand."""


@schema_app.command(cls=Command, help=CHECK_HELP)
def check(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="Files, folders, or -.", show_default=False)
    ],
    json_output: Json = False,
    bounds: Annotated[bool, typer.Option(help="Apply the default bounds of requests.")] = True,
    strict: Annotated[
        bool, typer.Option("--strict", help="Note what OpenAI's strict mode would refuse.")
    ] = False,
    strict_keywords: Annotated[
        bool, typer.Option("--strict-keywords", help="Refuse keywords that no draft defines.")
    ] = False,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Model folder or GGUF file with the tokenizer for which masks are timed."
        ),
    ] = None,
    grammar_backend: Annotated[
        str, typer.Option(help="Grammar engine: llguidance, or a plugin's name.")
    ] = "llguidance",
) -> None:
    from mmengine.checkpoint.model_files import is_gguf  # Lazy: numpy
    from mmengine.cli.schema_reports import (  # Lazy: help does not need it.
        CheckOptions,
        check_all,
        print_reports,
    )
    from mmengine.structured_output.json_schema.emission.bounds import Bounds

    if tokenizer is not None and not (tokenizer.is_dir() or is_gguf(tokenizer)):
        raise InvalidRequest(
            f"there is no folder {tokenizer}; --tokenizer must name a model's folder, or its GGUF file"
        )
    options: CheckOptions = {
        "bounds": None if bounds else Bounds.off(),
        "strict": strict,
        "strict_keywords": strict_keywords,
    }
    code = print_reports(check_all(paths, grammar_backend, tokenizer, options), json_output)
    if code:
        raise typer.Exit(code)
