"""How loading gets on is said: by lines, or by a bar in a terminal."""

import io

import pytest

from mmengine.cli import loading
from mmengine.cli.loading import LINE_EVERY_S
from mmengine.models.progress import tell, weights_told


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_lines_come_now_and_then(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with loading.loading("a model") as progress:
        for part in range(5):
            progress(part * 10**9, 4 * 10**9)
            now[0] += LINE_EVERY_S / 2
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "mmengine: loading a model",
        "mmengine: 2,000 of 4,000 MB of weights are read",
        "mmengine: 4,000 of 4,000 MB of weights are read",
        "mmengine: loaded in 25.0 s",
    ]


def test_a_terminal_has_a_bar_that_goes_away(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with pytest.raises(ValueError, match="broken"), loading.loading("a model") as progress:
        progress(1 * 10**9, 4 * 10**9)
        bar = progress._bar
        progress(2 * 10**9, 4 * 10**9)
        raise ValueError("broken")
    assert bar.finished is False and not bar.live.is_started
    assert bar.tasks[0].completed == 2 * 10**9 and "GB" in terminal.getvalue()


def test_an_engine_tells_of_its_weights():
    from mmengine import Engine

    told = []
    with weights_told(lambda *some: told.append(some)), Engine():
        pass
    whole = max(whole for _, whole in told)  # of the model; its draft head comes behind
    read = [num_bytes for num_bytes, of in told if of == whole]
    assert len(read) > 10 and read == sorted(read) and 0.9 < read[-1] / whole <= 1
    count = len(told)
    tell(1, 2)  # nobody hears it any more
    assert len(told) == count
