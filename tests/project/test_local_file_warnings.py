"""Who passes on messages of strangers is told, wherever they would look, that paths in them are read."""

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
def test_local_files_is_told_of_with_strangers(name):
    told = [each for each in PLACES[name].split("\n\n") if '{"local_files": False}' in each]
    assert told and "stranger" in told[0] and "path" in told[0].lower()
