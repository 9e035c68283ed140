"""What the README and the examples say is run as it stands there."""

import asyncio
import json
import random
import runpy
import shlex
from pathlib import Path

import msgspec
import pytest

from mmengine.cli import main as cli
from tests.house.doc_blocks import blocks

ROOT = Path(__file__).parents[1]


def test_the_ten_lines_work(capsys):
    for block in blocks("README.md", "python"):
        exec(compile(block.text, block.name, "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 6 and json.loads(printed[0])["objects"]


def test_the_forms_of_answers_work(capsys):
    printed = []
    for block in blocks("docs/structured_output.md", "python"):
        exec(compile(block.text, block.name, "exec"), {"__name__": "block"})
        printed.append(capsys.readouterr().out)
    record, values, listed, call, noted = printed
    assert "corners" in record and values.startswith("[{") and "[Item(" in values and listed.startswith("- ")
    call = json.loads(call.strip().removeprefix("<tool_call>").removesuffix("</tool_call>"))
    assert call["name"] == "area" and call["arguments"].keys() == {"shape", "size"}
    assert noted.strip() in (ROOT / "docs" / "structured_output.md").read_text(), "as the page prints it"


def test_schemas_are_checked_as_shown(tmp_path, monkeypatch, capsys):
    (tmp_path / "schemas").mkdir()
    for name in ("invoice.json", "schemas/a.json"):
        (tmp_path / name).write_text('{"type": "object"}')
    monkeypatch.chdir(tmp_path)
    (block,) = blocks("docs/structured_output.md", "sh")
    for command in block.text.splitlines():
        monkeypatch.setattr("sys.argv", shlex.split(command))
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert not end.value.code and "exact" in capsys.readouterr().out


def test_the_commands_work(tmp_path, monkeypatch, capsys):
    from mmengine_shapes.scenes import random_scene

    random_scene(random.Random(2)).draw().save(tmp_path / "shapes.png")
    parts = [{"type": "image_url", "image_url": {"url": "shapes.png"}}, {"type": "text", "text": "Describe."}]
    line = {"custom_id": "a", "messages": [{"role": "user", "content": parts}], "max_tokens": 64}
    (tmp_path / "requests.jsonl").write_text(json.dumps(line))
    (tmp_path / "shapes.schema.json").write_text('{"type": "array", "items": {"enum": ["circle", "square"]}}')
    monkeypatch.chdir(tmp_path)
    commands = [line for block in blocks("README.md", "sh") for line in block.text.splitlines()]
    assert len(commands) == 9
    for command in commands:
        monkeypatch.setattr("sys.argv", shlex.split(command))
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert not end.value.code, (command, capsys.readouterr().err)
    assert "text" in json.loads((tmp_path / "answers.jsonl").read_text())


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
