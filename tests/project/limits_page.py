"""docs/reference/limits.md, made from the code: settings with their ranges, sampling options, and constants.

python -m tests.project.limits_page     writes the page (make limits)
"""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import get_args, get_type_hints

import msgspec

from mmengine import request
from mmengine.config import EngineConfig
from mmengine.server.settings import ServerSettings
from mmengine.structured_output.json_schema.emission.bounds import Bounds
from tests.project.code_size import uncollected
from tests.project.limit_sources import Constant, Sources, comment

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "limits.md"
MOST_SAID = 3  # sentences that are shown of one limit
HEAD = """# Limits

Every limit, its default, and what is said when it is reached. `make limits` makes this page from the code,
and a test holds it to it. "…" stands for what a message takes from the request.

What is beyond a limit of a request is refused before it becomes work, with a sentence shown here. Where none
is shown, what stands beside the limit happens, or another limit of this page is reached first.

## Settings

Fields of `EngineConfig`: `mmengine run --set NAME=VALUE`, or by name in Python. A value out of its range is
refused: `NAME must lie in LOW to HIGH, not …`.

| setting | default | range | what it bounds | what is said |
|---|---|---|---|---|
"""
SERVER = """
## Settings of the server

Of `mmengine serve`, as `--max-body-bytes` ([how](http.md)); out of its range a value is refused as above.

| setting | default | range | what it bounds | what is said |
|---|---|---|---|---|
"""
SAMPLING = """
## Sampling options

Of each request, by the same names at every door. What is said: `NAME must be an integer from LOW to HIGH, not
…`, or `a number` in place of `an integer`.

| option | default | range |
|---|---|---|
"""
BOUNDS = """
## Bounds of structured answers

What a schema leaves open is bounded; `"bounds": {NAME: VALUE}` beside it sets another bound, 0 none
([how](../how-to/structured_output.md)). Nothing is said: no longer answer can be written.

| bound | default | what it bounds |
|---|---|---|
"""
CONSTANTS = """
## Constants

No setting changes these.
"""


@uncollected()
def page(root: Path = ROOT) -> str:
    sources = Sources(root)
    text = HEAD + "".join(_settings(sources, EngineConfig, "config.py"))
    text += (
        SERVER
        + "".join(_settings(sources, ServerSettings, "server/settings.py"))
        + SAMPLING
        + "".join(_sampling())
    )
    text += BOUNDS + "".join(_bounds(root)) + CONSTANTS
    folder_of = lambda limit: _folder(limit.module.path)  # noqa: E731
    for folder, limits in groupby(sorted(sources.limits(), key=folder_of), folder_of):
        text += f"\n### `{folder}`\n\n| limit | value | what it bounds | what is said |\n|---|---|---|---|\n"
        text += "".join(_constant(sources, limit) for limit in limits)
    return text


def _folder(path: Path) -> str:
    return str(Path(*path.parts[:2])) if len(path.parts) > 2 else path.parts[0]


def _settings(sources: Sources, kind: type[msgspec.Struct], path: str) -> Iterator[str]:
    hints = get_type_hints(kind, include_extras=True)
    lines = (ROOT / "mmengine" / path).read_text().splitlines()
    for field in msgspec.structs.fields(kind):
        ranges = [each for each in get_args(hints[field.name]) if isinstance(each, msgspec.Meta)]
        if not ranges:
            continue
        (line,) = [n for n, text in enumerate(lines, 1) if text.startswith(f"    {field.name}: ")]
        said = _sentences(sources.said_of_setting(field.name))
        low, high = ranges[0].ge, ranges[0].le
        default = _value(field.name, field.default)
        yield _row(f"`{field.name}`", default, f"{low:,} to {high:,}", comment(lines, line), said)


def _sampling() -> Iterator[str]:
    for name, low, high in (*request._INT_RANGES, *request._FLOAT_RANGES):
        default = getattr(request.SamplingParams(), name)
        yield _row(f"`{name}`", f"{default}", f"{low} to {high:,}")


def _bounds(root: Path) -> Iterator[str]:
    lines = (root / "mmengine/structured_output/json_schema/emission/bounds.py").read_text().splitlines()
    for name, default in msgspec.structs.asdict(Bounds()).items():
        (line,) = [n for n, text in enumerate(lines, 1) if text.startswith(f"    {name}: int")]
        yield _row(f"`{name}`", f"{default:,}", comment(lines, line))


def _constant(sources: Sources, limit: Constant) -> str:
    where = Path(*limit.module.path.parts[len(Path(_folder(limit.module.path)).parts) :])
    said = _sentences(sources.said_of_constant(limit))
    return _row(f"`{limit.name}`, {where}", _value(limit.name, limit.value), limit.comment, said)


def _value(name: str, value: int | float) -> str:
    if isinstance(value, int) and value >= 2**10 and any(word in name.lower() for word in ("byte", "body")):
        for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
            if value % size == 0:
                return f"{value // size:,} {unit}"
    return f"{value:,}"


def _sentences(said: list[str]) -> str:
    return "<br>".join(f"`{text.replace('`', chr(39))}`" for text in said[:MOST_SAID])


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


if __name__ == "__main__":
    PAGE.write_text(page())
