"""Tests that the commands in docs/tutorials/a_broken_build.md print the shown output."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.console_docs import COLUMNS, agrees, commands, run
from tests.test_debugging import SCRIPTS

ROOT = Path(__file__).parents[1]
SHOWN = commands((ROOT / "docs" / "tutorials" / "a_broken_build.md").read_text())
BUGS = ("budget", "crash")


def scripts_of(bug: str) -> list[str]:
    return [command for command, _ in SHOWN if command.startswith("python ") and bug in command.split()]


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """Run the page's commands, and return each command's printed lines. Each bug's scripts run in a separate
    process, because they patch mmengine.
    """
    folder = tmp_path_factory.mktemp("broken_build")
    (folder / "examples").symlink_to(ROOT / "examples")
    path = os.pathsep.join(
        [str(ROOT), str(ROOT / "plugins"), str(ROOT / "examples/debugging/bugs"), *sys.path]
    )
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": COLUMNS}
    said = {}
    for bug in BUGS:
        words = json.dumps([shlex.split(command)[1:] for command in scripts_of(bug)])
        command = [sys.executable, "-c", SCRIPTS, words]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        outputs = [json.loads(line)[1] for line in done.stdout.splitlines()]
        for command, text in zip(scripts_of(bug), outputs, strict=True):
            said[command] = [line.rstrip() for line in text.splitlines()]
    for command, _ in SHOWN:
        if command not in said:
            said[command] = run(command, folder)
    return said


def test_the_page_shows_the_printed_output(printed):
    assert len(SHOWN) == 11
    for command, lines in SHOWN:
        assert agrees(lines, printed[command]), (command, printed[command])
