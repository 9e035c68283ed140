"""Tests that the commands in docs/tutorials/a_debugger_session.md print the page's output."""

from pathlib import Path

from tests.cli.console_docs import agrees, commands, run

ROOT = Path(__file__).parents[1]
SHOWN = commands((ROOT / "docs" / "tutorials" / "a_debugger_session.md").read_text())


def test_the_page_shows_the_printed_output(tmp_path):
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    assert len(SHOWN) == 10
    for command, lines in SHOWN:
        printed = run(command, tmp_path)
        assert agrees(lines, printed), (command, printed)
