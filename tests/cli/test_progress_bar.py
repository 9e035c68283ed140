"""Tests the progress bar of commands."""

import io
import sys

from mmengine.cli.logs.verify import _progress
from mmengine.cli.progress_bar import progress_bar


class Terminal(io.StringIO):
    def isatty(self):
        return True


def replace_stderr(monkeypatch, shown):
    for name, value in (("TERM", "xterm"), ("COLUMNS", "120")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stderr", shown)
    return shown


def test_a_bar_shows_text_amounts_and_note_on_a_terminal(monkeypatch):
    terminal = replace_stderr(monkeypatch, Terminal())
    with progress_bar("answering", 8, stays=True) as bar:
        bar.update(3)
        bar.advance()
        bar.note("12 tokens/s")
        assert bar.is_shown
    shown = terminal.getvalue()
    assert "answering" in shown and "4/8" in shown and "12 tokens/s" in shown


def test_a_bar_prints_nothing_without_a_terminal(monkeypatch):
    shown = replace_stderr(monkeypatch, io.StringIO())
    with progress_bar("answering", 8) as bar:
        bar.advance()
        assert not bar.is_shown
    assert shown.getvalue().strip() == ""


def test_a_log_named_like_markup_is_shown_as_it_is(monkeypatch, tmp_path):
    terminal = replace_stderr(monkeypatch, Terminal())
    log = tmp_path / "run[bold]"
    log.mkdir()
    with _progress([log]) as begin:
        assert begin(log) is not None
    assert "verifying run[bold]" in terminal.getvalue()
