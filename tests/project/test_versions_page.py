"""docs/reference/versions.md says the numbers of this build."""

from pathlib import Path

from mmengine.core.decide.scheduler import DECISION_VERSION
from mmengine.core.snapshot.snapshot import VERSION
from mmengine.events.segment import FORMAT
from mmengine.events.vocabulary import SCHEMA_VERSION
from mmengine.version import __version__

TEXT = (Path(__file__).parents[2] / "docs" / "reference" / "versions.md").read_text()


def test_the_page_says_the_numbers_of_this_build():
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
