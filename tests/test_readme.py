"""What the README and the examples say is run as it stands there."""

import asyncio
import json
import random
import runpy
import shlex
import shutil
from pathlib import Path

import msgspec
import pytest

from mmengine.cli import main as cli
from tests.project.doc_blocks import blocks, commands

ROOT = Path(__file__).parents[1]


def test_the_ten_lines_work(tmp_path, monkeypatch, capsys):
    from mmengine_shapes.scenes import random_scene

    (tmp_path / "demo").mkdir()
    random_scene(random.Random(2)).draw().save(tmp_path / "demo" / "image1.png")
    monkeypatch.chdir(tmp_path)
    for block in blocks("README.md", "python"):
        exec(compile(block.text, block.name, "exec"), {})
    described, *printed = capsys.readouterr().out.splitlines()
    assert described.startswith("At the ") and len(printed) == 6 and json.loads(printed[0])["objects"]


def test_the_forms_of_answers_work(capsys):
    printed = []
    for block in blocks("docs/how-to/structured_output.md", "python"):
        exec(compile(block.text, block.name, "exec"), {"__name__": "block"})
        printed.append(capsys.readouterr().out)
    record, values, listed, call, noted = printed
    assert "corners" in record and values.startswith("[{") and "[Item(" in values and listed.startswith("- ")
    call = json.loads(call.strip().removeprefix("<tool_call>").removesuffix("</tool_call>"))
    assert call["name"] == "area" and call["arguments"].keys() == {"shape", "size"}
    assert noted.strip() in (ROOT / "docs" / "how-to" / "structured_output.md").read_text(), (
        "as the page prints it"
    )


def test_schemas_are_checked_as_shown(tmp_path, monkeypatch, capsys):
    (tmp_path / "schemas").mkdir()
    for name in ("invoice.json", "schemas/a.json"):
        (tmp_path / name).write_text('{"type": "object"}')
    monkeypatch.chdir(tmp_path)
    (block,) = blocks("docs/how-to/structured_output.md", "sh")
    for command in block.text.splitlines():
        monkeypatch.setattr("sys.argv", shlex.split(command))
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert not end.value.code and "exact" in capsys.readouterr().out


def test_the_commands_work(tmp_path, monkeypatch, capsys):
    """Beside a copy of the examples, whose requests name what `mmengine demo` leaves beside them."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(tmp_path)
    shown = [command for block in blocks("README.md", "sh") for command in commands(block)]
    assert len(shown) == 10
    for command in shown:
        monkeypatch.setattr("sys.argv", shlex.split(command))
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert not end.value.code, (command, capsys.readouterr().err)
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert {each["custom_id"] for each in answers} == {"described", "counted", "sampled"}


def test_the_schema_of_the_examples_is_that_of_scenes():
    from mmengine_shapes.questions import scene_schema

    assert json.loads((ROOT / "examples" / "shapes.schema.json").read_text()) == scene_schema()


def test_the_streaming_example_works(capsys):
    answers = asyncio.run(runpy.run_path(str(ROOT / "examples" / "stream.py"))["main"]())
    assert all(answers) and answers[0] in capsys.readouterr().out


def test_the_receipts_are_read_as_they_were_drawn(tmp_path, capsys):
    from mmengine_shapes.questions import scene_json
    from mmengine_shapes.scenes import random_scene

    example = runpy.run_path(str(ROOT / "examples" / "receipts.py"))
    receipts = asyncio.run(example["main"](tmp_path))
    assert len((ROOT / "examples" / "receipts.py").read_text().splitlines()) < 40
    assert all(isinstance(receipt, example["Receipt"]) for receipt in receipts) and len(receipts) == 50
    drawn = [scene_json(random_scene(random.Random(k))) for k in range(50)]
    right = sum(
        msgspec.json.encode(receipt).decode() == text for receipt, text in zip(receipts, drawn, strict=True)
    )
    assert right >= 48 and "100%" in capsys.readouterr().out
