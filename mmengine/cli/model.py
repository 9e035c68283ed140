"""`mmengine model`: tells whether a model can be served, before its weights are downloaded."""

from typing import Annotated

import typer

from mmengine.cli.commands import Command, Group
from mmengine.cli.logs.printing import Json

CHECK_HELP = (
    "Check whether a model can be served, before its weights are downloaded.\n\n"
    "MODEL is a hub id, a folder or a GGUF file. For a model on a hub, only the config, tokenizer and "
    "processor files are downloaded. The report tells which implementation serves the model, and what that "
    "implementation does not support; how much memory the weights and the KV of one request need; and the "
    "command that serves the model.\n\n"
    "[bold]described[/bold]: mmengine's own networks and kernels. [bold]transformers[/bold]: the modules of "
    "the installed transformers on mmengine's paged cache. [bold]refused[/bold]: with the reason. A model "
    "that passes here is compared with its own forward once more when its weights are loaded.\n\n"
    "Exit code: 0 if the model can be served, 1 if it is refused, 2 if it cannot be read.\n\n"
    "[bold]Examples[/bold]\n\n  mmengine model check Qwen/Qwen3-VL-2B-Instruct\n\n"
    "  mmengine model check ./my-model --context 32768\n\n"
    "  mmengine model check zai-org/GLM-OCR --json"
)
model_app = typer.Typer(
    cls=Group,
    help="Look at models. Needs no GPU.",
    epilog="Start with: mmengine model check NAME.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)


@model_app.callback()
def model() -> None:
    """Do nothing. Without this callback, typer would not make the only command a subcommand."""


@model_app.command(cls=Command, help=CHECK_HELP)
def check(
    name: Annotated[
        str, typer.Argument(metavar="MODEL", help="Hub id, folder or GGUF file.", show_default=False)
    ],
    context: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of tokens in a request, to compute the KV's memory (default: the model's limit).",
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Dtype of the KV: bfloat16, float16 or float32.")] = "bfloat16",
    json_output: Json = False,
) -> None:
    from mmengine.cli.model_check import check_model, print_report  # Lazy: help does not need it.

    report = check_model(name, context=context, dtype=dtype)
    print_report(report, json_output)
    if report.refused:
        raise typer.Exit(1)
