"""Tests that docs/reference/log.md shows the output that its commands print."""

from tests.cli.console_docs import ROOT, agrees, commands, run


def test_the_page_shows_the_printed_output(tmp_path):
    shown = commands((ROOT / "docs" / "reference" / "log.md").read_text())
    assert len(shown) > 10
    for command, lines in shown:
        printed = run(command, tmp_path)
        assert agrees(lines, printed), (command, printed)


def test_a_different_line_is_detected():
    assert agrees(["a", "…", "c"], ["a", "b", "b", "c"]) and agrees([], [])
    assert not agrees(["a", "…", "c"], ["a", "b", "d"]) and not agrees(["a"], ["a", "b"])
