"""Runs examples/search_images.py and the commands of docs/how-to/search-images.md."""

import random
import runpy
import shlex
import sys

import pytest

from mmengine import Engine
from mmengine_shapes.scenes import random_scene
from tests.cli.cli_process import call_cli
from tests.project.doc_blocks import ROOT, blocks, commands

pytest.importorskip("apsw")
pytest.importorskip("sqlite_vec")


def test_the_page_s_commands_find_the_picture_itself(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pictures").mkdir()
    for number in range(3):
        random_scene(random.Random(number)).draw().save(tmp_path / "pictures" / f"{number:02}.png")
    shown = [each for block in blocks("docs/how-to/search-images.md", "sh") for each in commands(block)]
    (embed,) = (each for each in shown if each.startswith("mmengine"))
    words = shlex.split(embed.partition(" --model")[0])[1:]
    assert call_cli(*words, "--set", "task=embed").returncode == 0
    assert len((tmp_path / "vectors.jsonl").read_text().splitlines()) == 3
    printed = []
    for command in (each for each in shown if each.startswith("python")):
        monkeypatch.setattr(sys, "argv", shlex.split(command)[1:])
        runpy.run_path(str(ROOT / "examples" / "search_images.py"), run_name="__main__")
        printed.append(capsys.readouterr().out.splitlines())
    assert printed[0] == ["3 pictures are in pictures.db"] and len(printed[1]) == 3
    assert printed[2][0] == "0.000  pictures/00.png"


def test_a_second_drawing_is_found():
    example = runpy.run_path(str(ROOT / "examples" / "search_images.py"))
    with Engine(task="embed") as engine:
        recall = example["measure"](engine, 12)
    assert recall["second drawing"] == 1.0 and 0 <= recall["caption"] <= 1
