"""Generates docs/reference/cli.md, settings.md and events.md from the code.

python -m tests.project.reference_pages     writes the pages (`make limits`)

The texts are the commands' help, the settings' descriptions and the events' docstrings.
"""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
from typer.main import get_command

from mmengine.cli.main import app
from mmengine.config import EngineConfig
from mmengine.events import vocabulary
from mmengine.server.settings import ServerSettings

FOLDER = Path(__file__).parents[2] / "docs" / "reference"
CLI = """# Command line

`make limits` writes this page from the commands' help; `mmengine COMMAND --help` prints the same text.
Options of `mmengine serve` also come from the environment (`MMENGINE_PORT`) and from the `--config` file.
`python -m mmengine` is the same command.

## Exit codes

| code | meaning |
|---|---|
| 0 | success |
| 1 | an error that may pass, such as a download that broke off; a batch with errors in some lines |
| 2 | wrong arguments or settings, or a model that does not exist or cannot be read |
| 3 | decisions in a log differ from the derived ones, or cannot be applied to the state |
| 4 | a damaged log |
| 5 | the engine died, and a restart does not help or is not allowed; for `log verify`: only folded |
| 70 | a bug: an exception that no code expects, with its traceback |
| 75 | a step hung (`step_timeout_s`) |
| 130, 143 | ended by Ctrl-C or by SIGTERM |
| 6, 7, 8, 13, 14 | [log commands](log.md): a damaged log, or one without its end; `log rerun`: 6, no answer |

If an engine dies of an unexpected exception, stderr and the file `failure.txt` in the log's folder have the
traceback, the step, and the requests in its rows.
"""
SETTINGS = """# Settings

`make limits` writes this page from the code. [Limits](limits.md) has the ranges.
"""
ENGINE = """
## Engine

Fields of `EngineConfig`: `--set NAME=VALUE` on the command line, keyword arguments of `Engine` and
`AsyncEngine`. A resumed log keeps its settings. Sizes are in tokens unless the name says otherwise; encoder
sizes are in embeddings.

| setting | type | default | meaning |
|---|---|---|---|
"""
SERVER = """
## Server

Options of `mmengine serve`: `--max-body-bytes` for `max_body_bytes`. Times are in seconds, sizes in bytes.

| setting | type | default | meaning |
|---|---|---|---|
"""
EVENTS = """# Events

`make limits` writes this page from `mmengine/events/vocabulary.py`. A log is a sequence of these events.
[The log format](log-format.md) describes their bytes, and [the log](log.md) the commands that read them.

* An **observation** is a fact that only the log knows: an arrival, a token, a failure. `verify` takes
  observations as input.
* A **decision** follows from the state. `verify` derives each decision again and compares.

Integer columns are little-endian int32 bytes. Fields are only added at the end, with a default, and a number
is never used twice.
"""


def cli_page() -> str:
    sections = "".join(_section(name, command) for name, command in _commands(get_command(app), "mmengine"))
    return CLI + sections


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    if hasattr(command, "commands"):
        for each in command.commands.values():
            if not each.hidden:
                yield from _commands(each, f"{name} {each.name}")
    else:
        yield name, command


def _section(name: str, command: Any) -> str:
    paragraphs = [each.strip() for each in _plain(command.help or "").split("\n\n") if each.strip()]
    text, is_example, examples = f"\n## {name}\n", False, []
    for paragraph in paragraphs:
        if paragraph in ("Example", "Examples"):
            is_example = True
        elif is_example and paragraph.startswith(("mmengine", "curl")):
            examples += [line.strip() for line in paragraph.splitlines()]
        else:
            text += f"\n{paragraph}\n"
    if examples:
        text += "\n```text\n" + "".join(f"{line}\n" for line in examples) + "```\n"
    rows = [_option(each) for each in command.params if not getattr(each, "hidden", False)]
    rows = [row for row in rows if "`--help`" not in row]
    return text + ("\n| argument | default | meaning |\n|---|---|---|\n" + "".join(rows) if rows else "")


def _plain(text: str) -> str:
    return re.sub(r"\[/?[a-z ]+\]", "", inspect.cleandoc(text)).replace("\b", "")


def _option(param: Any) -> str:
    names = ", ".join(f"`{name}`" for name in (*param.opts, *param.secondary_opts))
    if param.param_type_name == "argument":
        names = f"`{(param.metavar or param.name or '').upper().strip('[]')}`"
    shown = getattr(param, "show_default", None)
    default = shown if isinstance(shown, str) else "" if param.default in (None, False, ()) else param.default
    default = "" if callable(default) else default
    meaning = _plain(getattr(param, "help", "") or "").replace("\n", " ")
    return _row(names, f"{default}", meaning)


def settings_page() -> str:
    return SETTINGS + ENGINE + _settings(EngineConfig) + SERVER + _settings(ServerSettings)


def _settings(struct: type[msgspec.Struct]) -> str:
    rows = ""
    hints = get_type_hints(struct, include_extras=True)
    for field in msgspec.structs.fields(struct):
        default = "" if field.default is msgspec.NODEFAULT else msgspec.json.encode(field.default).decode()
        rows += _row(
            f"`{field.name}`",
            _type(field.type),
            f"`{default}`",
            hints[field.name].__metadata__[-1].description,
        )
    return rows


def _type(hint: Any) -> str:
    if hint is type(None):
        return "null"
    hint = getattr(hint, "__origin__", hint) if hasattr(hint, "__metadata__") else hint
    args = getattr(hint, "__args__", ())
    if "Literal" in str(hint):
        return ", ".join(f"`{each!r}`".replace("'", '"') for each in args)
    if args and "Union" in str(type(hint)):
        return " or ".join(_type(each) for each in args)
    if getattr(hint, "__origin__", None) is tuple:
        return f"list of {_type(args[0])}"
    return getattr(hint, "__name__", str(hint))


def events_page() -> str:
    text = EVENTS
    for number, kind in sorted(vocabulary.TYPES.items()):
        doc = re.sub(r"\s+", " ", inspect.getdoc(kind) or "")
        text += f"\n## {kind.__name__} ({number})\n\n{doc}\n\n| field | type | default |\n|---|---|---|\n"
        for field in msgspec.structs.fields(kind):
            hint = str(kind.__annotations__.get(field.name, field.type)).replace("mmengine.request.", "")
            name = getattr(kind.__annotations__.get(field.name), "__name__", "") or hint
            name = hint if "[" in hint or "|" in hint else name
            default = "" if field.default is msgspec.NODEFAULT else f"`{field.default!r}`"
            text += _row(f"`{field.name}`", f"`{name}`", default)
    return text


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


PAGES = {"cli.md": cli_page, "settings.md": settings_page, "events.md": events_page}

if __name__ == "__main__":
    for name, written in PAGES.items():
        (FOLDER / name).write_text(written())
