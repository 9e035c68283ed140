"""Tests that the commands and code in the README, the tutorials and the examples run."""

import asyncio
import json
import random
import re
import runpy
import shlex
import shutil
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from mmengine.cli import main as cli
from mmengine.cli import showcase
from tests.cli import console_docs
from tests.project.doc_blocks import blocks, commands

ROOT = Path(__file__).parents[1]


ANSWER = "At the top right is a large red square. At the left is a large orange circle."


@pytest.fixture
def demo_folder(tmp_path, monkeypatch):
    """Change to a folder with the examples and the images that `mmengine demo` draws."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    showcase.questions(tmp_path / "demo", 12)
    return tmp_path


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= 1200


def test_the_readmes_image_is_the_demos(demo_folder):
    # docs/images/shapes.png equals the first image that `mmengine demo` draws.
    assert (demo_folder / "demo" / "image1.png").read_bytes() == (
        ROOT / "docs" / "images" / "shapes.png"
    ).read_bytes()


def test_the_readmes_pipeline_describes_the_image(demo_folder, capsys):
    (block,) = blocks("README.md", "python")
    exec(compile(block.text, block.name, "exec"), {})
    assert capsys.readouterr().out.strip() == ANSWER and ANSWER in (ROOT / "README.md").read_text()
    assert len([line for line in block.text.splitlines() if line]) <= 6


def test_the_readmes_transcript_is_one(demo_folder):
    """Compare the transcript with a new run. Steps and times differ between runs, but `mmengine log why` must
    print the sentences in the transcript.
    """
    (run_batch, verify, why) = console_docs.commands((ROOT / "README.md").read_text())
    printed = console_docs.run(run_batch[0], demo_folder)
    assert printed[0].startswith("12 answers and 0 errors in answers.jsonl, 360 tokens in ")
    assert run_batch[1][0].startswith("12 answers and 0 errors in answers.jsonl, 360 tokens in ")
    verified = console_docs.run(verify[0], demo_folder)
    assert [re.sub(r"\d+", "N", line) for line in verified] == [
        re.sub(r"\d+", "N", line) for line in verify[1]
    ]
    explained = [console_docs.run(f"mmengine log why busy.log json{n}", demo_folder) for n in (1, 2, 3, 4)]
    known = " ".join(line for lines in explained for line in lines)
    starts = re.findall(r"^steps? \d+.*? ms  (\w+ \w+)", "\n".join(why[1]), flags=re.MULTILINE)
    assert len(starts) > 4 and not [each for each in starts if each not in known and not each[0].isdigit()]


def test_the_tutorials_python_runs(demo_folder, capsys):
    for block in blocks("docs/tutorials/first_answers.md", "python"):
        exec(compile(block.text, block.name, "exec"), {})
    described, *printed = capsys.readouterr().out.splitlines()
    assert described == ANSWER and len(printed) == 6 and json.loads(printed[0])["objects"]


def test_the_tutorial_shows_the_examples_loop():
    (block,) = blocks("docs/tutorials/a_killed_server.md", "python")
    assert block.text in (ROOT / "examples" / "killed_server.py").read_text()


def test_the_forms_of_answers_work(capsys):
    printed = []
    for block in blocks("docs/how-to/structured_output.md", "python"):
        exec(compile(block.text, block.name, "exec"), {"__name__": "block"})
        printed.append(capsys.readouterr().out)
    record, values, listed, doubtful, call, noted = printed
    assert doubtful.strip() in ("[]", "['']")
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


def test_the_commands_work(demo_folder, monkeypatch, capsys):
    """Run each command of the README and the first tutorial."""
    shown = [
        command
        for block in (*blocks("README.md", "sh"), *blocks("docs/tutorials/first_answers.md", "sh"))
        for command in commands(block)
    ]
    assert len(shown) == 10
    for command in shown:
        monkeypatch.setattr("sys.argv", shlex.split(command))
        with pytest.raises(SystemExit) as end:
            cli.main()
        printed = capsys.readouterr()
        assert not end.value.code, (command, printed.err)
        if "Describe the image." in command:
            assert printed.out.strip() == ANSWER
    answers = [json.loads(line) for line in (demo_folder / "answers.jsonl").read_text().splitlines()]
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
    (other := tmp_path / "other").mkdir()
    (other / "note.txt").write_text("no picture")
    with pytest.raises(SystemExit, match="no pictures"):
        asyncio.run(example["read"](other))
    shutil.rmtree(other)
    found = asyncio.run(example["read"](tmp_path))
    receipts = [each.receipt for each in found]
    assert all(isinstance(receipt, example["Receipt"]) for receipt in receipts) and len(receipts) == 50
    drawn = [scene_json(random_scene(random.Random(k))) for k in range(50)]
    right = sum(
        msgspec.json.encode(receipt).decode() == text for receipt, text in zip(receipts, drawn, strict=True)
    )
    assert right >= 48 and "100%" in capsys.readouterr().out
    ranked = sorted(found, key=lambda each: min(each.sure.values()))
    # Only the first two pictures in `ranked` have fields below this limit.
    below = min(ranked[2].sure.values())
    doubtful = [p for each in found for p in each.sure.values() if p < below]
    page = example["page"](found, below)
    assert page.count("class='check'") == len(doubtful) > 1 and page.count("data:image/png") == 50
    assert page.index(f"<th>{ranked[0].path.name}") < page.index(f"<th>{ranked[1].path.name}")
    Console(file=(text := StringIO()), width=200).print(example["table"](found, below))
    oddly = [found[0]._replace(path=tmp_path / "[red]a[bold].png")]
    Console(file=(odd := StringIO()), width=200).print(example["table"](oddly, below))
    assert "[red]a[bold].png" in odd.getvalue()
    assert text.getvalue().count("? 0.") + text.getvalue().count("? 1.00") == len(doubtful)
