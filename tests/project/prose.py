"""Measures word rates in docstrings and documents, and compares the rates with their upper limits.

    python -m tests.project.prose     # prints the rates, and fails if a rate exceeds its limit

`make check` runs this command. The limits may only become stricter. Words in code, tables, quoted terms and
link targets are not counted.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.project import code_size

ROOT = Path(__file__).parents[2]
PACKAGES = ("mmengine", "plugins")
# Pages that are generated from docstrings, help texts and limits.toml.
GENERATED = {f"docs/reference/{name}.md" for name in ("cli", "events", "limits", "settings")}
DOCUMENTS = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**/*.md")
# Maximum number of occurrences per 1,000 words.
BARS = {
    "docstrings": {"what": 2.0, "of": 20.0, "it": 8.0, "one": 5.0, "behind/those/nobody/whoever": 0.5},
    "documents": {"what": 2.0, "of": 20.0, "it": 8.0, "one": 5.0, "behind/those/nobody/whoever": 0.5},
}
# Minimum number of docstring words per public function: 70 % of the 28.5 words in commit f9563ed5.
FEWEST_WORDS_PER_FUNCTION = 20.0
_WORD = re.compile(r"[a-z][a-z'-]*")


@dataclass(frozen=True)
class Prose:
    """Word counts of a set of source files or documents, and the files' number of public functions."""

    words: Counter[str]
    public_functions: int = 0

    @property
    def total(self) -> int:
        return self.words.total()

    def rate(self, names: str) -> float:
        """Return the occurrences per 1,000 words of all words in `names` ("a/b") together."""
        return 1000 * sum(self.words[name] for name in names.split("/")) / max(1, self.total)


def words_of(text: str) -> list[str]:
    """Return the words in `text`, in lower case. Code, tables, quoted terms and link targets are left out."""
    text = re.sub(r"```.*?```|<!--.*?-->", " ", text, flags=re.DOTALL)
    lines = [line for line in text.splitlines() if not re.match(r"\s{4,}\S|\s*\|", line)]
    text = re.sub(r"`[^`]*`", " ", "\n".join(lines))
    text = re.sub(r'"[^"\n]*"', " ", re.sub(r"\]\([^)]*\)", "]", text))
    return _WORD.findall(text.lower())


def docstrings(tree: ast.AST) -> Iterator[str]:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(tree):
        if isinstance(node, kinds) and (found := ast.get_docstring(node)):
            yield found


def docstring_prose(paths: Iterable[Path]) -> Prose:
    words: Counter[str] = Counter()
    functions = 0
    for path in paths:
        tree = ast.parse(path.read_text())
        for text in docstrings(tree):
            words.update(words_of(text))
        functions += sum(
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_")
            for node in ast.walk(tree)
        )
    return Prose(words, functions)


def document_prose(paths: Iterable[Path]) -> Prose:
    return Prose(Counter(word for path in paths for word in words_of(path.read_text())))


def measured() -> dict[str, Prose]:
    sources = code_size.sources(PACKAGES)
    pages = {path for pattern in DOCUMENTS for path in ROOT.glob(pattern)}
    pages = {path for path in pages if path.relative_to(ROOT).as_posix() not in GENERATED}
    return {"docstrings": docstring_prose(sources), "documents": document_prose(pages)}


def problems(found: dict[str, Prose]) -> list[str]:
    """Return a line for each broken limit."""
    lines = [
        f"{kind}: {name} {prose.rate(name):.1f} per 1,000 words; the bar is {bar}"
        for kind, prose in found.items()
        for name, bar in BARS[kind].items()
        if prose.rate(name) > bar
    ]
    for kind, prose in found.items():
        if prose.public_functions and prose.total / prose.public_functions < FEWEST_WORDS_PER_FUNCTION:
            lines.append(
                f"{kind}: {prose.total / prose.public_functions:.1f} words per public function; "
                f"the bar is {FEWEST_WORDS_PER_FUNCTION}"
            )
    return lines


def main() -> None:
    found = measured()
    for kind, prose in found.items():
        rates = ", ".join(f"{name} {prose.rate(name):.1f} (<= {bar})" for name, bar in BARS[kind].items())
        print(f"{kind}: {prose.total:,} words; per 1,000: {rates}")
        if prose.public_functions:
            print(f"  {prose.total / prose.public_functions:.1f} per public function")
    if wrong := problems(found):
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
