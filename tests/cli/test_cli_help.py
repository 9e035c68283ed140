"""Tests that help and usage errors import no heavy modules, and that usage errors are a single line with
advice.
"""

import os
import re
import subprocess
import sys

import pytest
import typer

from mmengine.cli.main import app
from mmengine.errors import (
    BUG,
    ConfigError,
    CorruptLog,
    Diverged,
    ExecutorFailed,
    ExecutorLost,
    InvalidRequest,
    LogError,
    MMEngineError,
    ModelError,
    code_of,
)
from mmengine.hubs.hub import cut_off
from mmengine.hubs.names import HubName
from mmengine.version import __version__
from tests.cli.cli_process import HEAVY, call_cli, loaded, run_cli, run_clis

HELP = (
    (["--help"], ("run", "log", "env", "demo")),
    (["run", "--help"], ("--image", "--batch", "--top-p", "Examples")),
    (
        ["serve", "--help"],
        (
            "--api-key-file",
            "--drain-s",
            "[MODEL]",
            "NAME=VALUE",
            "docs/reference/limits.md",
            "Examples",
            "MMENGINE_PORT",
        ),
    ),
    (["log", "--help"], ("verify", "show")),
    (["log", "verify", "--help"], ("divergence",)),
    (["log", "show", "-h"], ("--steps",)),
    (["log", "kv-events", "--help"], ("--publish", "--replay", "Example")),
    (["schema", "check", "--help"], ("--tokenizer", "--strict-keywords", "Examples", "Exit code")),
)
MISTAKES = (
    (["run"], 2, "give a question"),
    (["run", "hi", "--max-tokens", "0"], 2, "max_tokens must be an integer from 1"),
    (["run", "hi", "--temperature", "nan"], 2, "temperature must be a number"),
    (["run", "hi", "--set", "token_budget"], 2, "name=value"),
    (["run", "hi", "--set", "tokens=3"], 2, "unknown engine setting 'tokens'"),
    (["run", "hi", "--set", "max_modellen=3"], 2, "did you mean max_model_len"),
    (["run", "hi", "--set", "gpu_memory_utilization=1"], 2, "--set num_blocks=N"),
    (["serve", "--tensor-parallel-size", "2"], 2, "--set tensor_parallel=N"),
    (["run", "hi", "--torch-dtype", "float16"], 2, "use --dtype"),
    (["run", "hi", "--set", "token_budget=many"], 2, "token_budget"),
    (["run", "hi", "--set", "token_budget=1"], 2, "smaller than max_num_seqs"),
    (["run", "hi", "--out", "x"], 2, "--out belongs to --batch"),
    (["run", "hi", "--batch", "x", "--out", "y"], 2, "a question and --batch"),
    (["run", "--batch", "x"], 2, "--out"),
    (["run", "--batch", "nowhere.jsonl", "--out", "y"], 1, "nowhere.jsonl: No such file"),
    (["schema", "check", "-", "--tokenizer", "nowhere"], 2, "there is no folder nowhere"),
    (["log", "verify", "nowhere"], 1, "no folder nowhere"),
    (["log", "verify", "."], 1, "has no log"),
    (["log", "kv-events", "nowhere"], 1, "no folder nowhere"),
    (["serve", "--max-model-len", "2048"], 2, "--set max_model_len=2048"),
    (["run", "hi", "--max-num-seqs=4"], 2, "--set max_num_seqs=4"),
    (["serve", "a/b", "--gpu-memory-utilization", "0.9"], 2, "--set num_blocks=N"),
    (["serve", "a/b", "--model", "c/d"], 2, "'a/b' and --model 'c/d'"),
    (["serve", "--kv-events", "tcp://*:5557"], 2, "give --log"),
)


def test_help_shows_examples_and_imports_nothing_heavy(tmp_path):
    for result, (arguments, says) in zip(run_clis([each[0] for each in HELP], tmp_path), HELP, strict=True):
        assert result.returncode == 0
        assert all(word in result.stdout for word in says), (arguments, result.stdout)
        assert not any(f"'{name}'" in loaded(result) for name in (*HEAVY, "numpy")), arguments


def _pages(command, *words):
    yield [*words, "--help"], command
    for name, each in getattr(command, "commands", {}).items():
        yield from _pages(each, *words, name)


def test_flags_show_no_type_and_lists_show_the_repeated_type():
    for words, command in _pages(typer.main.get_command(app)):
        shown = call_cli(*words, env={**os.environ, "COLUMNS": "200"}).stdout
        assert "Usage" in shown and not [word for word in ("<bool>", "<list[") if word in shown], shown
        for option in command.params:
            if getattr(option, "multiple", False):
                assert option.metavar and "may be repeated" in option.help, (words, option.name)


def test_option_names_are_whole_in_a_narrow_terminal():
    for name, command in typer.main.get_command(app).commands.items():
        if hasattr(command, "commands"):
            continue
        shown = call_cli(name, "--help", env={**os.environ, "COLUMNS": "80"}).stdout
        for option in command.params:
            missing = [each for each in option.opts if each.startswith("-") and f"{each} " not in shown]
            assert not missing and not re.search(r"-\w*…", shown), name


def test_a_narrow_help_changes_no_later_help():
    shown = {}
    for columns in ("200", "80", "200", "80"):
        page = call_cli("serve", "--help", env={**os.environ, "COLUMNS": columns}).stdout
        assert shown.setdefault(columns, page) == page
    assert shown["80"] != shown["200"]


@pytest.mark.parametrize(
    ("line", "found"),
    [("ser", {"serve"}), ("run --max-t", {"--max-tokens"}), ("run --set max_mod", {"max_model_len="})],
)
def test_a_shell_completes_commands_options_and_settings(line, found):
    words = f"mmengine {line}"
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    result = call_cli(env={**os.environ, "_MMENGINE_COMPLETE": "complete_bash", **asked})
    assert found <= set(result.stdout.split()) and len(result.stdout.split()) < 9


def test_no_arguments_show_the_help():
    result = call_cli()
    assert "Usage" in result.stdout + result.stderr and result.returncode in (0, 2)


def test_the_version_is_printed():
    result = call_cli("--version")
    assert (result.returncode, result.stdout) == (0, f"mmengine-vl {__version__}\n")


def test_an_unknown_option_is_a_usage_error():
    result = call_cli("run", "--imgae", "x")
    assert result.returncode == 2 and "--imgae" in result.stderr and "Traceback" not in result.stderr


def test_mistakes_are_one_line_before_any_model_is_loaded(tmp_path):
    found = run_clis([each[0] for each in MISTAKES], tmp_path)
    for result, (arguments, code, says) in zip(found, MISTAKES, strict=True):
        lines = [line for line in result.stderr.splitlines() if not line.startswith("LOADED")]
        assert result.returncode == code and len(lines) == 1 and lines[0].startswith("mmengine: "), arguments
        assert says in lines[0]
        assert "torch" not in loaded(result), arguments


def test_exit_codes_name_the_class_of_an_error(monkeypatch, tmp_path):
    for words in (["run", "hi", "--model"], ["serve", "--port", "0", "--log", tmp_path / "log"]):
        result = call_cli(
            *words, *(["/nowhere/model"] if words[0] == "run" else ["--model", "/nowhere/model"])
        )
        assert result.returncode == 2 and "no model folder /nowhere/model" in result.stderr
    classes = {
        ConfigError: 2, ModelError: 2, InvalidRequest: 2, Diverged: 3, CorruptLog: 4, ExecutorFailed: 5,
        ExecutorLost: 5, MMEngineError: 5, LogError: 1,
    }  # fmt: skip
    assert {kind: code_of(kind("text")) for kind in classes} == classes
    assert code_of(cut_off(HubName("hf", "a/b"), "reset")) == 1  # the next try may succeed
    monkeypatch.setattr("mmengine.cli.main._command", lambda: 1 / 0)
    result = call_cli("env")
    assert result.returncode == BUG == 70 and "Traceback" in result.stderr
    assert "a bug ended the command (ZeroDivisionError" in result.stderr.splitlines()[-1]


def test_python_m_mmengine_is_the_command():
    result = subprocess.run(
        [sys.executable, "-m", "mmengine", "--version"], capture_output=True, text=True, check=True
    )
    assert result.stdout == f"mmengine-vl {__version__}\n"


def test_the_other_mmengine_is_named(tmp_path):
    info = tmp_path / "mmengine-0.10.7.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mmengine\nVersion: 0.10.7\n")
    env = {"PYTHONPATH": ":".join([str(tmp_path), *sys.path])}
    result = run_cli("--help", env=env)
    assert result.returncode == 0 and "OpenMMLab's mmengine 0.10.7" in result.stderr
