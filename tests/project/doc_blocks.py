"""Finds the code blocks in all documents: fenced blocks, and blocks indented by four spaces."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("", "docs/**", "benchmarks/results", "plugins/*", "examples/**")
GENERATED = "docs/reference/cli.md"  # Generated from the commands' help by tests/project/reference_pages.py.
_COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*(mmengine|python|make|pip|git|bash) ")
_FENCE = re.compile(r"(\s*)(```+|~~~+)\s*(\S*)\s*$")


@dataclass(frozen=True)
class Block:
    """A code block. `language`: the fence's language; "" if the fence names no language, "indented" if there
    is no fence.
    """

    document: str
    line: int
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.document}:{self.line}"


def documents() -> list[str]:
    found = {path for folder in FOLDERS for path in ROOT.glob(f"{folder}/*.md" if folder else "*.md")}
    return sorted({str(path.relative_to(ROOT)) for path in found} - {GENERATED})


def blocks(document: str, language: str | None = None) -> list[Block]:
    """Return a document's blocks in order. If `language` is given, return only blocks with this language."""
    found = parse(document, (ROOT / document).read_text())
    return [block for block in found if language is None or block.language == language]


def commands(block: Block) -> list[str]:
    """Return a block's commands without comments, or [] for a block without commands."""
    lines = block.text.replace("\\\n", "").splitlines()
    return [line.partition("  #")[0].strip() for line in lines] if _COMMAND.match(block.text) else []


def parse(document: str, text: str) -> list[Block]:
    found: list[Block] = []
    lines = text.splitlines()
    place = 0
    while place < len(lines):
        begin = place
        fence = _FENCE.match(lines[place])
        if fence is not None:
            place += 1
            while not lines[place].strip().startswith(fence[2]):  # An unclosed fence raises IndexError.
                place += 1
            body = [line.removeprefix(fence[1]) for line in lines[begin + 1 : place]]
            found.append(Block(document, begin + 1, fence[3], "".join(f"{line}\n" for line in body)))
        elif lines[place].startswith("    ") and (not begin or not lines[begin - 1].strip()):
            while place < len(lines) and (lines[place].startswith("    ") or not lines[place].strip()):
                place += 1
            body = [line.removeprefix("    ") for line in lines[begin:place]]
            text_of = "\n".join(body).rstrip() + "\n"
            found.append(Block(document, begin + 1, "indented", text_of))
        place += 1
    return found
