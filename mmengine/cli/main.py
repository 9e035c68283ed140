"""The command `mmengine`. Each command imports its dependencies only when it runs. Therefore help is fast."""

import os
import sys
import traceback
from functools import cache
from typing import Annotated, NoReturn

import typer
from typer.main import get_command

from mmengine.cli.bench import bench_app
from mmengine.cli.chat import HELP as CHAT_HELP
from mmengine.cli.chat import chat
from mmengine.cli.commands import Command, Group
from mmengine.cli.demo import demo
from mmengine.cli.embed import HELP as EMBED_HELP
from mmengine.cli.embed import embed
from mmengine.cli.env import clash, env
from mmengine.cli.environment import unknown_variables
from mmengine.cli.extract import HELP as EXTRACT_HELP
from mmengine.cli.extract import extract
from mmengine.cli.logs import log_app
from mmengine.cli.model import model_app
from mmengine.cli.run import HELP as RUN_HELP
from mmengine.cli.run import run
from mmengine.cli.schema import schema_app
from mmengine.cli.serve import HELP as SERVE_HELP
from mmengine.cli.serve import serve
from mmengine.cli.simulate import HELP as SIMULATE_HELP
from mmengine.cli.simulate import simulate
from mmengine.cli.supervisor import is_supervised
from mmengine.errors import BUG, MMEngineError, code_of, in_one_line
from mmengine.extras import engine_hint
from mmengine.version import __version__

app = typer.Typer(
    cls=Group,
    name="mmengine",
    help="Run and serve multimodal models, with an event log that explains and verifies every decision.",
    epilog="Start with: mmengine demo",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"mmengine-vl {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version, and exit."
        ),
    ] = False,
) -> None:
    pass


app.command(cls=Command, help=RUN_HELP)(run)
app.command(cls=Command, help=CHAT_HELP)(chat)
app.command(cls=Command, help=SERVE_HELP)(serve)
app.command(cls=Command, help=EMBED_HELP)(embed)
app.command(cls=Command, help=EXTRACT_HELP)(extract)
app.add_typer(bench_app, name="bench")
app.add_typer(log_app, name="log")
app.add_typer(model_app, name="model")
app.add_typer(schema_app, name="schema")
app.command(cls=Command, help=SIMULATE_HELP)(simulate)
app.command(cls=Command)(env)
app.command(cls=Command)(demo)


# Cached, because building the 25 commands takes 18 ms. `app(...)` would build them at each call of `main`.
_command = cache(lambda: get_command(app))


def main() -> None:
    """Run the command. Print an error as one line on stderr, and an unexpected exception with its traceback.

    docs/reference/cli.md lists the exit codes.
    """
    # If this process has a supervisor, the supervisor has already printed the warning about unknown
    # variables.
    warnings = [clash(), "" if is_supervised() else unknown_variables(os.environ)]
    for warning in filter(None, warnings):
        print(f"mmengine: warning: {warning}", file=sys.stderr)
    try:
        _command()(prog_name="mmengine")
    except MMEngineError as error:
        _fail(str(error), code_of(error))
    except ModuleNotFoundError as error:
        hint = engine_hint(error)
        if hint is None:
            traceback.print_exc()
            _fail(f"{error}: the installation is incomplete", BUG)
        _fail(hint, 2)
    except BrokenPipeError:
        sys.stderr.close()  # The reader of the pipe has ended.
        sys.exit(1)
    except OSError as error:
        _fail(f"{error.filename or 'a file'}: {error.strerror or error}", 1)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except Exception as error:
        traceback.print_exc()
        _fail(f"a bug ended the command ({in_one_line(error)}); please report it with the lines above", BUG)


def _fail(message: str, code: int) -> NoReturn:
    print(f"mmengine: {message}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
