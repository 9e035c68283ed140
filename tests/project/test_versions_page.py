"""docs/reference/versions.md says today's numbers, and which rules this build derives."""

import re
from pathlib import Path

from mmengine.core.decide.schedule import COMPAT_DECIDED_VERSIONS, DECIDED_VERSIONS, DECISION_VERSION
from mmengine.core.snapshot.snapshot import VERSION
from mmengine.events.segment import FORMAT
from mmengine.events.vocabulary import SCHEMA_VERSION
from mmengine.version import __version__

TEXT = (Path(__file__).parents[2] / "docs" / "reference" / "versions.md").read_text()


def test_the_page_says_todays_numbers():
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
    (derived,) = re.findall(r"`DECIDED_VERSIONS` \(today ([^)]*)\)", TEXT)
    assert tuple(map(int, derived.split(" and "))) == DECIDED_VERSIONS
    (derived,) = re.findall(r"`COMPAT_DECIDED_VERSIONS`[^,]*, today ([^:]*):", TEXT)
    assert tuple(map(int, derived.split(" and "))) == COMPAT_DECIDED_VERSIONS
    numbers = [int(row[0]) for row in rows if len(row) == 2 and row[0].isdecimal()]
    ours = [*range(1, SCHEMA_VERSION + 1), *range(1, DECISION_VERSION + 1)]
    assert numbers == [*ours, *COMPAT_DECIDED_VERSIONS]
