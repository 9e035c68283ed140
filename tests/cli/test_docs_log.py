"""docs/reference/log.md shows what its commands print."""

from tests.cli.console_docs import ROOT, agrees, commands, run


def test_the_page_shows_what_is_printed(tmp_path):
    shown = commands((ROOT / "docs" / "reference" / "log.md").read_text())
    assert len(shown) > 10
    for command, lines in shown:
        printed = run(command, tmp_path)
        assert agrees(lines, printed), (command, printed)


def test_a_line_that_differs_is_seen():
    assert agrees(["a", "…", "c"], ["a", "b", "b", "c"]) and agrees([], [])
    assert not agrees(["a", "…", "c"], ["a", "b", "d"]) and not agrees(["a"], ["a", "b"])
