"""Limits the lengths of files and functions, and the number of type escapes, with a list of exceptions.

    python -m tests.project.code_size     writes the present numbers into code_size.toml if they went down

A file has at most 400 lines and a function at most 70. code_size.toml lists the length of each longer file
and function, and the number of type escapes (such as `cast` and `Any`) in the installed packages. These
numbers may only decrease, and no entry may be added.
"""

import ast
import io
import sys
import tokenize
import tomllib
from collections import Counter
from pathlib import Path

from mmengine.paused_collection import paused_collection

ROOT = Path(__file__).parents[2]
LISTED = Path(__file__).with_name("code_size.toml")
FOLDERS = ("mmengine", "plugins", "benchmarks", "examples", "tests")
INSTALLED = ("mmengine", "plugins")
MOST_LINES_OF_A_FILE, MOST_LINES_OF_A_FUNCTION = 400, 70
ESCAPES = ("Any", "cast", "type: ignore")
Limits = dict[str, dict[str, int]]


def sources(folders: tuple[str, ...]) -> list[Path]:
    """Return the Python files below the folders, except in `build`, where `pip install` leaves copies."""
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return sorted(path for path in paths if "build" not in path.relative_to(ROOT).parts)


def functions(tree: ast.AST, within: str = "") -> list[tuple[str, int]]:
    """Return each function's dotted name and its number of lines without decorators."""
    found = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{within}{node.name}"
            if not isinstance(node, ast.ClassDef):
                found.append((name, node.end_lineno - node.lineno + 1))
            found += functions(node, f"{name}.")
        elif not isinstance(node, ast.expr):  # Expressions define no functions.
            found += functions(node, within)
    return found


def escapes(text: str) -> Counter:
    """Count the type escapes in a source text. Importing `Any` or `cast` does not count."""
    found = Counter()
    if not any(word in text for word in ESCAPES):
        return found
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    imports = False
    for token, after in zip(tokens, [*tokens[1:], tokens[-1]]):
        if token.type == tokenize.NEWLINE:
            imports = False
        elif token.string in ("import", "from") and token.line.split()[0] in ("import", "from"):
            imports = True
        elif token.type == tokenize.COMMENT and "type: ignore" in token.string:
            found["type: ignore"] += 1
        elif token.type == tokenize.NAME and not imports:
            found["Any"] += token.string == "Any"
            found["cast"] += token.string == "cast" and after.string == "("
    return found


@paused_collection()  # Garbage collection would scan a million live syntax tree nodes.
def measured() -> Limits:
    """Return the lengths of files and functions that exceed a limit, and the numbers of type escapes."""
    files, long_functions, count = {}, {}, Counter(dict.fromkeys(ESCAPES, 0))
    for path in sources(FOLDERS):
        name, text = path.relative_to(ROOT).as_posix(), path.read_text()
        if (lines := len(text.splitlines())) > MOST_LINES_OF_A_FILE:
            files[name] = lines
        for function, lines in functions(ast.parse(text)):
            if lines > MOST_LINES_OF_A_FUNCTION:
                long_functions[f"{name}:{function}"] = lines
        if name.startswith(INSTALLED):
            count += escapes(text)
    return {"files": files, "functions": long_functions, "escapes": {name: count[name] for name in ESCAPES}}


def listed() -> Limits:
    return tomllib.loads(LISTED.read_text())


def grown(now: Limits, before: Limits) -> list[str]:
    """Return a line for each new entry, and for each entry that is larger than listed."""
    return [
        f"{name}: {number}, {f'listed with {before[kind][name]}' if name in before[kind] else 'not listed'}"
        for kind, found in now.items()
        for name, number in found.items()
        if number > before[kind].get(name, 0)
    ]


def shrunk(now: Limits, before: Limits) -> list[str]:
    """Return a line for each entry that is smaller than listed."""
    return [
        f"{name}: listed with {number}, today {now[kind].get(name, 'within the limit')}"
        for kind, entries in before.items()
        for name, number in entries.items()
        if number > now[kind].get(name, 0)
    ]


def write(limits: Limits) -> None:
    lines = ["# Exceptions to the limits on length; tests/project/code_size.py writes this file."]
    for kind, found in limits.items():
        lines += ["", f"[{kind}]", *(f'"{name}" = {number}' for name, number in sorted(found.items()))]
    LISTED.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    today = measured()
    wrong = grown(today, listed())
    if wrong:
        sys.exit("\n".join(["larger than code_size.toml allows:", *wrong]))
    write(today)
