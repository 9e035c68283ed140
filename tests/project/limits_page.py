"""Writes docs/reference/limits.md: a table with every limit that a request, a file or a setting can meet.

python -m tests.project.limits_page     writes the page (`make limits`)

Names, defaults and ranges come from the code. tests/project/limits.toml says what happens at a limit and
which module enforces it. A constant is a limit if its name matches `LIMIT`; its comment describes the limit.
"""

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import get_args, get_type_hints

import msgspec

from mmengine import request
from mmengine.config import EngineConfig
from mmengine.server.settings import ServerSettings
from mmengine.structured_output.json_schema.emission import bounds
from tests.project import code_size

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "limits.md"
TEXTS = Path(__file__).with_name("limits.toml")
LIMIT = re.compile(r"MAX_[A-Z_]+|(?:[A-Z_]+_)?LIMIT(?:_S)?|[A-Z_]+_TIMEOUT_S")
HEAD = """# Limits

Every setting with a range, and every fixed limit that a request or a file can meet. `make limits` writes this
page from the code. A value outside its range is refused: `NAME must lie in LOW to HIGH, not VALUE`.

* **engine**: a field of `EngineConfig`; `--set NAME=VALUE` on the command line, a keyword argument in Python.
* **server**: an option of `mmengine serve`, such as `--max-body-bytes` for `max_body_bytes`.
* **sampling**: a field of each request, with the same name in Python, request files and HTTP.
* **schema**: a field of `"bounds": {NAME: VALUE}` beside a schema
  ([how](../how-to/structured_output.md#bounds)); 0: no limit.
* **fixed**: a constant; no setting changes it. Limits on a schema's intermediate forms are not listed: such a
  schema is refused, and the error names the keyword that grows too large.

| limit | kind | default | range | what happens at the limit | enforced in |
|---|---|---|---|---|---|
"""
Number = int | float


def page() -> str:
    """Return the page's text."""
    texts = tomllib.loads(TEXTS.read_text())
    rows = [
        *_settings("engine", EngineConfig, texts["engine"]),
        *_settings("server", ServerSettings, texts["server"]),
        *_sampling(texts["sampling"]),
        *_schema(),
        *_fixed(texts["fixed"]),
    ]
    return HEAD + "".join(rows)


def ranges(kind: type[msgspec.Struct]) -> dict[str, msgspec.Meta]:
    """Return the range for each struct field with a minimum, keyed by field name."""
    found = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        metas = [each for each in get_args(hint) if isinstance(each, msgspec.Meta)]
        if metas and metas[0].ge is not None:
            found[name] = metas[0]
    return found


def _settings(kind: str, struct: type[msgspec.Struct], modules: dict[str, str]) -> Iterator[str]:
    defaults = {field.name: field.default for field in msgspec.structs.fields(struct)}
    for name, meta in ranges(struct).items():
        limits = f"{_value(name, meta.ge)} to {_value(name, meta.le)}"
        yield _row(
            f"`{name}`",
            kind,
            _value(name, defaults[name]),
            limits,
            meta.description or "",
            f"`{modules[name]}`",
        )


def _sampling(texts: dict[str, str]) -> Iterator[str]:
    defaults = request.SamplingParams()
    for name, low, high in (*request._INT_RANGES, *request._FLOAT_RANGES):
        default = f"{getattr(defaults, name)}"
        yield _row(f"`{name}`", "sampling", default, f"{low} to {high:,}", texts[name], "`request.py`")


def _schema() -> Iterator[str]:
    path = Path(bounds.__file__)
    lines = path.read_text().splitlines()
    highest = {
        "decimals": f"{bounds.MAX_PLACES}",
        "digits": f"{bounds.MAX_DIGITS}",
        "max_digits": f"{bounds.MAX_RUN:,}",
    }
    for name, default in msgspec.structs.asdict(bounds.Bounds()).items():
        (line,) = [n for n, text in enumerate(lines, 1) if text.startswith(f"    {name}: int")]
        text = _sentence(comment(lines, line))
        text += "" if name == "ordered" else " No longer answer can be generated."
        where = f"`{path.relative_to(ROOT / 'mmengine')}`"
        shown = "the engine's" if default is None else f"{default:,}"
        yield _row(f"`{name}`", "schema", shown, f"0 to {highest.get(name, '∞')}", text, where)


def _fixed(texts: dict[str, str]) -> Iterator[str]:
    for key, path, name, value, text in constants(texts):
        where = path.removeprefix("mmengine/").removeprefix("plugins/")
        described = texts[key] if ":" in key else f"{text} {texts[key]}"
        yield _row(f"`{name}`", "fixed", _value(name, value), "", described, f"`{where}`")


def constants(keys: Iterable[str]) -> Iterator[tuple[str, str, str, Number, str]]:
    """Yield key, path, name, value and description for each fixed limit. A key is `path:NAME` for a single
    constant, or a file's or folder's path for all its constants.
    """
    for file in code_size.sources(("mmengine", "plugins")):
        path = file.relative_to(ROOT).as_posix()
        near = [key for key in keys if f"{path}/".startswith(f"{key.partition(':')[0]}/")]
        if not near:
            continue
        source = file.read_text()
        lines, values = source.splitlines(), {}
        for node in ast.parse(source).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                values[name] = number(node.value, values)
                matching = [key for key in near if ":" not in key or key == f"{path}:{name}"]
                if matching and LIMIT.fullmatch(name) and values[name] is not None:
                    text = _description(name, comment(lines, node.lineno))
                    yield max(matching, key=len), path, name, values[name], text


def number(node: ast.AST, names: dict[str, Number | None]) -> Number | None:
    """Return an arithmetic expression's value, or None for any other expression. `names`: constants assigned
    earlier.
    """
    match node:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.Name(id=name):
            return names.get(name)
        case ast.BinOp(left=left, op=op, right=right):
            a, b = number(left, names), number(right, names)
            by = {ast.Mult: "__mul__", ast.Pow: "__pow__", ast.Sub: "__sub__", ast.FloorDiv: "__floordiv__"}
            if a is not None and b is not None and type(op) in by:
                result: Number = getattr(a, by[type(op)])(b)
                return result
    return None


def comment(lines: list[str], line: int) -> str:
    """Return the comment at a line's end, or else the comment lines above the line."""
    _, found, text = lines[line - 1].partition("  # ")
    above = line - 1
    while not found and above > 0 and lines[above - 1].strip().startswith("# "):
        above -= 1
        text = f"{lines[above].strip()[2:]} {text}".strip()
    return text


def _description(name: str, text: str) -> str:
    """Return a sentence that describes a constant: its comment. A comment such as "of a message" continues
    the constant's name, so the name is put first.
    """
    words = name.removeprefix("MAX_").lower().replace("chars", "characters").split("_")
    said = f"Maximum {'number of ' if words[-1].endswith('s') else ''}{' '.join(words)}"
    if not text or text.startswith(("of ", "in ", "that ", "from ", "for ", "before ", "between ")):
        return _sentence(f"{said} {text}".strip())
    return _sentence(text)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


def _value(name: str, value: Number) -> str:
    if isinstance(value, int) and value >= 2**10 and any(word in name.lower() for word in ("byte", "body")):
        for exponent, unit in ((50, "PiB"), (40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
            if value % 2**exponent == 0:
                return f"{value // 2**exponent:,} {unit}"
    return f"{value:,}"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


if __name__ == "__main__":
    PAGE.write_text(page())
