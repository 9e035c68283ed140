"""Tests that commit subjects have the form `area: imperative summary`. Commits that are older than this file
are not checked.
"""

import re
import subprocess
from pathlib import Path

import pytest

from tests.project.doc_blocks import blocks

ROOT = Path(__file__).parents[2]
MOST_CHARS = 72
SUBJECT = re.compile(r"[a-z][a-z0-9_./, -]*: \S.*")
# Imperatives that end like a participle ("-ing", "-ed"). Summaries may begin with them.
IMPERATIVES = {"bring", "embed", "exceed", "feed", "need", "proceed", "seed", "shed", "speed", "string"}


def problem(subject: str) -> str:
    """Return the reason why a subject is refused; "" if it is good."""
    if len(subject) > MOST_CHARS:
        return f"it has {len(subject)} characters; the limit is {MOST_CHARS}"
    if not SUBJECT.fullmatch(subject):
        return "it does not begin with a lower-case area and a colon, as in `scheduler: skip idle rows`"
    if subject.endswith("."):
        return "it ends with a full stop"
    first = subject.partition(": ")[2].split()[0].lower()
    if first.endswith(("ing", "ed")) and first not in IMPERATIVES:
        return f"{first!r} is no imperative; say what the commit does, as in `docs: split server.md`"
    return ""


def git(*arguments: str) -> list[str]:
    """Return the lines that git prints; [] if there is no git or no repository."""
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return []


def new_subjects() -> list[str]:
    """Return the subjects of all commits after this file's first commit; [] without that history."""
    if git("rev-parse", "--is-shallow-repository") != ["false"]:
        return []
    here = Path(__file__).relative_to(ROOT).as_posix()
    added = git("log", "--diff-filter=A", "--format=%H", "--", here)
    return git("log", "--no-merges", "--format=%s", f"{added[-1]}..HEAD") if added else []


def test_new_commits_have_a_good_subject():
    refused = {subject: why for subject in new_subjects() if (why := problem(subject))}
    assert not refused


def test_the_examples_for_contributors_pass():
    (shown,) = blocks("CONTRIBUTING.md", "text")
    subjects = shown.text.splitlines()
    assert len(subjects) == 5 and not [subject for subject in subjects if problem(subject)]


@pytest.mark.parametrize(
    "subject",
    [
        "scheduler: skip encoder-starved requests instead of stopping the scan",
        "server: map error codes from MMEngineError.code, not from message text",
        "docs: split server.md into a how-to and a reference",
        "tests/cli, docs: embed the transcript",
    ],
)
def test_good_subjects_pass(subject):
    assert not problem(subject)


@pytest.mark.parametrize(
    ("subject", "why"),
    [
        ("Others than the first rows are always some", "lower-case area"),
        ("docs: split server.md.", "full stop"),
        ("Docs: split server.md", "lower-case area"),
        ("docs: splitting server.md", "no imperative"),
        ("docs: fixed a link", "no imperative"),
        (f"docs: {'split ' * 12}pages", "83 characters"),
    ],
)
def test_other_subjects_are_refused(subject, why):
    assert why in problem(subject)
