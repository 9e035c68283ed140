"""The command where the kernels cannot be compiled: one line says so, and the answer is the same."""

import os

import pytest
from cli_process import run_cli

QUESTION = ("run", "What is 3 plus 4?")


def lines_of(result):
    return [line for line in result.stderr.splitlines() if not line.startswith("LOADED")]


@pytest.fixture(scope="module")
def answer():
    result = run_cli(*QUESTION)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(
    "change, said",
    [
        ({"CXX": "no-such-compiler"}, "CXX names no-such-compiler"),
        ({"MMENGINE_CACHE": "/dev/null"}, "the cache folder /dev/null/native cannot be made"),
    ],
    ids=["no compiler", "no cache folder"],
)
def test_one_line_and_the_same_answer(answer, tmp_path, change, said):
    result = run_cli(*QUESTION, env={**os.environ, "MMENGINE_CACHE": str(tmp_path), **change})
    assert (result.returncode, result.stdout) == (0, answer)
    (line,) = lines_of(result)
    assert line.startswith("CPU kernels are off, torch computes instead, slower: ") and said in line


def test_env_says_what_computes(tmp_path):
    result = run_cli("env", env={**os.environ, "MMENGINE_CACHE": str(tmp_path), "CXX": "no-such-compiler"})
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("CPU kernels"))
    assert "off: CXX names no-such-compiler" in line
