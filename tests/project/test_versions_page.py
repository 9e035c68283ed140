"""Tests that docs/reference/versions.md shows this build's version numbers."""

from pathlib import Path

from mmengine.core.decide.scheduler import DECISION_VERSION
from mmengine.core.snapshot.snapshot import VERSION
from mmengine.events.segment import FORMAT
from mmengine.events.vocabulary import SCHEMA_VERSION
from mmengine.version import __version__

TEXT = (Path(__file__).parents[2] / "docs" / "reference" / "versions.md").read_text()


def test_the_page_shows_this_builds_versions():
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in TEXT.splitlines() if "|" in line
    ]
    today = {row[0]: row[3] for row in rows if len(row) == 4}
    found = {
        "log format": FORMAT,
        "schema": SCHEMA_VERSION,
        "decision rules": DECISION_VERSION,
        "snapshot format": VERSION,
        "package": __version__,
    }
    assert {name: today[name] for name in found} == {name: str(number) for name, number in found.items()}
