"""Tests that `mmengine log minimize` reduces a buggy run to few requests, for each bug in the table in
docs/tutorials/a_bad_night.md.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_debugging import SCRIPTS

ROOT = Path(__file__).parents[1]
BUGS = ROOT / "examples" / "debugging" / "bugs"
ROW = re.compile(r"^\| [^|]+ \| `(\w+)` \| `([^`]+)` \| (\d+) \| [\d.]+ \| ([^|]+) \|$", re.MULTILINE)
ROWS = {
    row[1]: row.groups()[1:]
    for row in ROW.finditer((ROOT / "docs" / "tutorials" / "a_bad_night.md").read_text())
}
# `budget` breaks an invariant; `late_stop` is found by comparison with another build (--against).
QUICK = ("budget", "late_stop")


def run(*command, **settings):
    path = os.pathsep.join([*map(str, settings.pop("path", ())), str(ROOT), str(ROOT / "plugins")])
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, *map(str, command)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def minimized(name, folder, num_requests):
    """Record a buggy run's log with night.py, and minimize the log with buggy.py in the same process. Return
    minimize's report.
    """
    log, (option, _, named) = folder / "night.log", ROWS[name]
    arguments = ("log", "minimize", log, *option.split(), "--seconds", 60, "-o", folder / "small", "--json")
    scripts = [(BUGS / "night.py", name, log, num_requests), (BUGS / "buggy.py", name, *arguments)]
    done = run("-c", SCRIPTS, json.dumps([[*map(str, words)] for words in scripts]), path=[BUGS])
    assert not done.returncode, done.stderr
    (made, _), (code, said) = map(json.loads, done.stdout.splitlines())
    assert (made, code) == (0, 0), done.stderr
    report = json.loads(said)
    assert report["requests"] <= 4
    if name != "crash":  # This bug ends the run at the third request.
        assert report["requests_before"] == num_requests
    said = f"{report['failure']} {report['what']}"
    assert all(word in said for word in named.replace("`", "").split(", ")), said
    return report


def test_the_table_has_each_class():
    """The table has a row for each bug in examples/debugging/bugs."""
    planted = {path.stem for path in BUGS.glob("*.py")} - {"buggy", "night"}
    assert ROWS.keys() == planted
    assert all(int(left) <= 4 for _, left, _ in ROWS.values())


def test_each_bug_patches_an_existing_function():
    done = run("-c", f"import {', '.join(sorted(ROWS))}", path=[BUGS])
    assert not done.returncode, done.stderr


@pytest.mark.parametrize("name", QUICK)
def test_a_short_night_becomes_small(tmp_path, name):
    minimized(name, tmp_path, 40)


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(ROWS))
def test_a_night_of_a_thousand_becomes_a_test(tmp_path, name):
    report = minimized(name, tmp_path, 1000)
    assert report["seconds"] <= 60
    test = ("-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path / "small")
    assert run(*test, "-p", name, path=[BUGS]).returncode == 1, "the test fails with the bug"
    assert run(*test).returncode == 0, "and passes without"
