"""Runs code blocks from the documents in a folder with a small log. test_doc_blocks.py names the test for
each other block, or the reason why no test runs the block.
"""

import io
import json
import re
import shlex
import sys
import tomllib
from contextlib import redirect_stdout

import pytest

from mmengine import Engine
from mmengine.core.state.policy import POLICIES, Policy
from mmengine.errors import InvalidRequest
from mmengine.structured_output.request.spec import grammar_of
from tests.cli.cli_process import call_cli
from tests.project.doc_blocks import ROOT, blocks, commands


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with the examples, a log and input files for the simulator."""
    folder = tmp_path_factory.mktemp("documents")
    (folder / "examples").symlink_to(ROOT / "examples")
    run(folder, "mmengine simulate examples/shared_images.json --log evening.log")
    (folder / "scenario.json").write_bytes((ROOT / "examples" / "shared_images.json").read_bytes())
    (folder / "settings.json").write_text('{"num_blocks": 300}')
    rows = [f"2024-05-10 00:00:0{k}.000000,{90 + k},{k + 2}" for k in range(6)]
    (folder / "trace.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    line = {"timestamp": 5, "input_length": 700, "output_length": 4, "hash_ids": [1, 2]}
    (folder / "trace.jsonl").write_text(json.dumps(line))
    return folder


def run(folder, command, code=0):
    words = shlex.split(command)
    assert words[0] == "mmengine", command
    done = call_cli(*words[1:], cwd=folder)
    assert done.returncode == code, (command, done.stdout, done.stderr)
    return done.stdout


@pytest.mark.long
def test_the_simulator_runs_as_shown(folder):
    (block,) = blocks("docs/how-to/simulation.md", "")
    for command in commands(block):
        for part in command.split(" && "):
            run(folder, part)
    assert (folder / "run.png").stat().st_size > 1000 and (folder / "out.jsonl").read_text()
    for request in blocks("docs/how-to/simulation.md", "json"):
        (folder / "one.jsonl").write_text(json.dumps(json.loads(request.text)))
        assert "1: 1 length" in run(folder, "mmengine simulate one.jsonl")


def test_a_session_answers_as_shown(capsys):
    (code,) = blocks("docs/how-to/sessions.md", "python")
    exec(compile(code.text, code.name, "exec"), {})
    assert "tokens were there" in capsys.readouterr().out


def test_policies_are_made_as_shown(folder, monkeypatch):
    (code,) = blocks("docs/explanation/policies.md", "python")
    found = {}
    exec(compile(code.text, code.name, "exec"), found)
    assert isinstance(found["policy"], Policy)
    (metadata,) = blocks("docs/explanation/policies.md", "toml")
    assert tomllib.loads(metadata.text)["project"]["entry-points"] == {
        POLICIES.group: {"shortest_remaining": "my_package:policy"}
    }
    (two,) = blocks("docs/explanation/policies.md", "indented")
    for command in commands(two):
        run(folder, command)
    lines = [(folder / name).read_text().splitlines() for name in ("ours.jsonl", "vllms.jsonl")]
    steps = [{each["step"]: each["sched"] for each in map(json.loads, text)} for text in lines]
    document = (ROOT / "docs" / "explanation" / "policies.md").read_text()
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \| ([^|]+) \|", document, re.M)
    assert len(rows) == 5
    for step, *shown in rows:
        for made, text in zip(steps, shown, strict=True):
            assert dict(made[int(step)]) == {name: int(n) for name, n in re.findall(r"(\w+) (\d+)", text)}


def test_a_log_is_walked_as_shown(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (code,) = blocks("docs/reference/log.md", "python")
    found = {}
    exec(compile(code.text, code.name, "exec"), found)
    assert found["step"].logged
    (reading,) = [
        each for each in blocks("docs/reference/log-format.md", "indented") if "import" in each.text
    ]
    run(folder, "mmengine simulate examples/shared_images.json --log torn.log")
    last = sorted((folder / "torn.log").glob("*.mmlog"))[-1]
    last.write_bytes(last.read_bytes()[:-100])
    found = {"folder": folder / "torn.log"}
    exec(compile(reading.text, reading.name, "exec"), found)
    assert found["writer"].recovery.cuts
    found["writer"].close()


def test_a_batch_is_resumed_as_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Engine(log="run.log") as engine:
        engine.submit("What is a triangle?", request_id="a", max_tokens=40)
        engine.step()
    (code,) = blocks("docs/explanation/crash.md", "python")
    found = {}
    exec(compile(code.text, code.name, "exec"), found)
    assert "engine" in found


@pytest.mark.long
def test_a_command_is_minimized_against_as_shown(folder):
    """`minimize --failing COMMAND` removes requests as long as the command fails."""
    (folder / "check.py").write_text(
        "import glob, sys\n"
        "files = glob.glob(sys.argv[1] + '/*.mmlog')\n"
        "sys.exit(any(b'finn' in open(path, 'rb').read() for path in files))\n"
    )
    block, *_ = blocks("docs/tutorials/a_bad_night.md", "indented")
    (command,) = commands(block)
    command = command.replace("run.log", "evening.log").replace("python", sys.executable)
    assert "8 requests became 1" in run(folder, command).replace("\n", " ")
    assert (folder / "small" / "test_minimized_command.py").is_file()


def test_messages_are_as_shown():
    (said,) = blocks("docs/how-to/structured_output.md", "indented")
    pet = {"oneOf": [{"type": "number"}, {"type": "integer"}]}
    schema = {"type": "object", "properties": {"pet": pet}}
    with pytest.raises(InvalidRequest) as refusal:
        grammar_of({"type": "json_schema", "json_schema": {"schema": schema}})
    assert str(refusal.value) == said.text.strip()


def test_the_embedded_checkpoint_answers_as_shown(monkeypatch):
    monkeypatch.chdir(ROOT)
    for (code,) in (
        blocks("plugins/mmengine_shapes/README.md", "python"),
        blocks("docs/reference/pipeline.md", "python"),
        blocks("docs/how-to/tools.md", "python"),
    ):
        with redirect_stdout(io.StringIO()):
            exec(compile(code.text, code.name, "exec"), {})


def test_the_environment_has_the_lines_that_are_shown(folder):
    printed = run(folder, "mmengine env").splitlines()
    texts = [
        block.text for name in ("docs/explanation/cpu.md", "docs/how-to/gpu.md") for block in blocks(name)
    ]
    shown = [line for text in texts for line in text.splitlines()]
    label = re.compile(r"(GPUs|CPU kernels|attention( \w+)?|tensor parallel)  +\w")
    names, known = (
        {found[1] for line in lines if (found := label.match(line))} for lines in (shown, printed)
    )
    assert len(names) == 8 and names <= known


def test_metadata_of_devices_names_their_group():
    (metadata,) = [
        each for each in blocks("docs/how-to/gpu.md", "indented") if each.text.startswith("[project")
    ]
    assert tomllib.loads(metadata.text)["project"]["entry-points"] == {
        "mmengine.devices": {"npu": "my_package:NpuDevice"}
    }
