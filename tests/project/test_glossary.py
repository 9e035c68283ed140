"""Tests that the glossary, the architecture page and CONTRIBUTING.md name only files and identifiers that
exist.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("docs/reference/glossary.md", "docs/explanation/architecture.md", "CONTRIBUTING.md")
NAMED = re.compile(r"`([\w./-]+\.\w+)`\s+\(((?:`[\w.]+`(?:,\s+)?)+)\)")


def file_of(path):
    return next((ROOT / tree / path for tree in ("", "mmengine") if (ROOT / tree / path).is_file()), None)


def problems(text):
    for path, names in NAMED.findall(text):
        file = file_of(path)
        if file is None:
            yield f"{path}: no such file"
            continue
        words = set(re.findall(r"\w+", file.read_text()))
        yield from (f"{path}: no {name}" for name in re.findall(r"`([\w.]+)`", names) if name not in words)


@pytest.mark.parametrize("page", PAGES)
def test_named_files_contain_the_names(page):
    text = (ROOT / page).read_text()
    assert len(NAMED.findall(text)) > 5 and not list(problems(text))


def test_missing_names_and_files_are_found():
    text = "`core/fold/evolve.py` (`evolve`, `devolve`), `core/gone.py` (`x`)"
    assert list(problems(text)) == ["core/fold/evolve.py: no devolve", "core/gone.py: no such file"]


def test_each_term_has_a_file_and_one_entry():
    text = (ROOT / "docs/reference/glossary.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    rows = [row for row in rows if row[0] != "word"]
    assert len(rows) > 50 and all(len(row) == 4 for row in rows)
    assert not [row[0] for row in rows if not file_of(row[3].split("`")[1])]
    words = [row[0] for row in rows]
    assert len(words) == len(set(words))
