"""Tests examples/watch_folder.py, which reads pictures as they arrive and answers questions about them."""

import os
import runpy
import sys
from pathlib import Path

from PIL import Image

from mmengine import Engine

EXAMPLE = Path(__file__).parents[2] / "examples" / "watch_folder.py"


def camera(folder, numbers):
    for number in numbers:
        path = folder / f"{number:03}.png"
        Image.new("RGB", (64, 64), (number * 9 % 256, 90, 160)).save(path)
        os.utime(path, (1000 + number, 1000 + number))


def test_questions_are_answered(tmp_path, monkeypatch, capsys):
    camera(tmp_path, range(5))
    monkeypatch.setattr(sys, "argv", ["watch", str(tmp_path), "--ask", "What is it?", "--ask", "And now?"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    first, *answers = capsys.readouterr().out.splitlines()
    assert first == "5 images found" and len(answers) == 2 and answers[1].endswith(" s)")


def test_pictures_that_come_are_taken_once_and_old_ones_forgotten(tmp_path):
    camera(tmp_path, range(4))
    with Engine() as engine:
        watch = runpy.run_path(str(EXAMPLE))["Watch"](engine, tmp_path, 10, 1)
        assert watch.look() == 4 and watch.look() == 0
        camera(tmp_path, range(4, 40))
        (tmp_path / "half.png").write_bytes(b"\x89PNG")
        assert watch.look() == 36, "the camera still writes one"
        watch.ask("What is it?")
        settings, tokens = watch._session.facts.settings, watch._session.facts.num_tokens
        assert tokens <= settings.length < 40 * 20, "not all of them are kept"
