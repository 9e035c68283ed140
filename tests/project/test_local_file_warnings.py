"""Tests that documents and public docstrings warn about file paths in untrusted messages. By default the
engine reads these files.
"""

import re
from pathlib import Path

import pytest

from mmengine import AsyncEngine, Engine, Prompt

ROOT = Path(__file__).parents[2]
PLACES = {
    **{name: (ROOT / name).read_text() for name in ("README.md", "SECURITY.md", "examples/stream.py")},
    "docs/explanation/architecture.md": (ROOT / "docs" / "explanation" / "architecture.md").read_text(),
    **{each.__name__: each.__doc__ for each in (AsyncEngine, Engine, Prompt)},
}


@pytest.mark.parametrize("name", PLACES)
def test_local_files_is_mentioned_with_strangers(name):
    found = [each for each in PLACES[name].split("\n\n") if '{"local_files": False}' in each]
    assert found and re.search("stranger|untrusted", found[0]) and "path" in found[0].lower()
