"""Tests that the commands in docs/tutorials/a_bad_night.md print the output that the page shows."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project.doc_blocks import blocks

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "tutorials" / "a_bad_night.md").read_text()


# Runs several scripts in one process. After a script imports examples/debugging/planted.py, all later scripts
# have the bug.
SCRIPTS = """
import contextlib, io, json, runpy, sys

sys.path.insert(0, "examples/debugging")
for words in json.loads(sys.argv[1]):
    sys.argv, out, code = words, io.StringIO(), 0
    with contextlib.redirect_stdout(out):
        try:
            runpy.run_path(words[0], run_name="__main__")
        except SystemExit as end:
            code = end.code or 0
    print(json.dumps([code, out.getvalue()]))
"""


def run(command, folder):
    paths = [str(Path(sys.executable).parent), os.environ["PATH"]]
    modules = [str(ROOT), str(ROOT / "plugins"), os.environ.get("PYTHONPATH", "")]
    settings = {"PATH": os.pathsep.join(paths), "PYTHONPATH": os.pathsep.join(modules)}
    command = command.replace("PYTHONPATH=", "PYTHONPATH=$PYTHONPATH:")
    return subprocess.run(
        command, shell=True, cwd=folder, env={**os.environ, **settings}, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """Run the tutorial's commands: first the example scripts, then all others. Return (folder, {command:
    output}).
    """
    folder = tmp_path_factory.mktemp("debugging")
    (folder / "examples").symlink_to(ROOT / "examples")
    lines = "".join(block.text for block in blocks("docs/tutorials/a_bad_night.md", "sh")).splitlines()
    scripts = [line for line in lines if line.startswith("python examples/")]
    words = json.dumps([shlex.split(line)[1:] for line in scripts])
    done = run(shlex.join([sys.executable, "-c", SCRIPTS, words]), folder)
    assert done.returncode == 0, done.stderr
    said = {}
    for line, (code, printed) in zip(scripts, map(json.loads, done.stdout.splitlines()), strict=True):
        assert code == 0, (line, printed, done.stderr)
        said[line] = printed
    for line in lines:
        if line not in said:
            command, _, expected = line.partition("  # exits with ")
            done = run(command, folder)
            assert done.returncode == int(expected or 0), (line, done.stdout, done.stderr)
            said[command] = done.stdout
    return folder, said


def of(session, words):
    return next(said for command, said in session[1].items() if words in command)


def test_what_is_shown_is_printed(session):
    """The tutorial shows the printed output, except for line breaks and times."""
    plain = lambda text: re.sub(r"\d+\.\d s\b", "S", " ".join(text.split()))  # noqa: E731
    printed = plain(" ".join(session[1].values()))
    shown = [
        block.text for block in blocks("docs/tutorials/a_bad_night.md", "") if "holds {" not in block.text
    ]
    assert len(shown) == 5
    for text in shown:
        for part in text.split("…"):
            assert plain(part) in printed, part


def test_the_engine_stops_and_the_log_verifies(session):
    assert "no progress at step 1496" in of(session, "night.py") and "no progress at step 1496" in TEXT
    assert "verified: no divergence" in of(session, "log verify")


def test_minimize_keeps_few_requests_of_a_thousand(session):
    found = re.search(r"1000 requests became (\d+)", of(session, "log minimize"))
    assert int(found[1]) <= 5
    for line in of(session, "log minimize").splitlines()[:3]:
        assert line in TEXT


def test_why_and_the_page_tell_the_story(session):
    assert "Preempted: no free blocks" in " ".join(of(session, "log why small").split())
    assert "in the encoder cache" in " ".join(of(session, "log why night").split())
    assert (session[0] / "night.html").stat().st_size > 100_000
    with_more_memory = of(session, "log rerun")
    assert "num_blocks 65 -> 129" in with_more_memory and "what if: the engine stops" not in with_more_memory


def test_the_python_shows_the_leak(session, tmp_path):
    (tmp_path / "walk.py").write_text(blocks("docs/tutorials/a_bad_night.md", "python")[0].text)
    done = run(f"PYTHONPATH=examples/debugging python {tmp_path / 'walk.py'}", session[0])
    shown = ["Preempted holds {0} [0, 0, 0, 1]", "Scheduled holds set() [0, 0, 0, 1]"]
    assert done.stdout.splitlines() == shown, done.stderr
    assert done.stdout in TEXT


def test_a_build_without_the_bug_diverges(session):
    done = run(f"{sys.executable} -m mmengine.cli.main log verify night.log", session[0])
    assert done.returncode == 3 and "DIVERGED at step 64" in done.stdout and "DIVERGED at step 64" in TEXT
