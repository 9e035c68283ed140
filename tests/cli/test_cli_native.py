"""Tests the command on a machine that cannot compile the CPU kernels. The command prints a line with the
reason, and the same answer as with kernels.
"""

import os

import pytest
import torch

from mmengine.native import library
from mmengine.native.blocks import multiplies_blocks
from tests.cli.cli_process import call_cli

QUESTION = ("run", "What is 3 plus 4?")


@pytest.fixture
def call_anew():
    """Yield a function that unloads the kernels and calls the command with a changed environment."""

    def call(*words, **change):
        library.forget()
        return call_cli(*words, env={**os.environ, **change})

    yield call
    library.forget()


@pytest.mark.parametrize(
    "change, said",
    [
        ({"CXX": "no-such-compiler"}, "CXX names no-such-compiler"),
        ({"MMENGINE_CACHE": "/dev/null"}, "the cache folder /dev/null/native cannot be created"),
    ],
    ids=["no compiler", "no cache folder"],
)
def test_one_line_and_the_same_answer(call_anew, tmp_path, change, said):
    answer = call_anew(*QUESTION)
    assert answer.returncode == 0 and "kernels are off" not in answer.stderr
    result = call_anew(*QUESTION, **{"MMENGINE_CACHE": str(tmp_path), **change})
    assert (result.returncode, result.stdout) == (0, answer.stdout)
    usual = answer.stderr.splitlines()
    (line,) = (each for each in result.stderr.splitlines() if each not in usual)
    assert line.startswith("CPU kernels are off, so torch computes, which is slower: ") and said in line


def test_env_names_the_types_that_stay_codes(call_anew):
    """`mmengine env` says which GGUF types stay quantised in memory, and for which dtypes."""
    result = call_anew("env")
    (held,) = (line for line in result.stdout.splitlines() if line.startswith("quantised weights"))
    kernels = library.load()
    if kernels is not None and multiplies_blocks(kernels, torch.float32):
        assert "GGUF's IQ4_NL, IQ4_XS, MXFP4, Q2_K" in held and "Q8_0 stay codes in " in held
        both = multiplies_blocks(kernels, torch.bfloat16)
        assert held.endswith(" bfloat16 and float32" if both else " float32")
    else:
        assert "dequantised" in held and "stay codes in float32" not in held


def test_env_names_the_compute_backend(call_anew, tmp_path):
    result = call_anew("env", MMENGINE_CACHE=str(tmp_path), CXX="no-such-compiler")
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("CPU kernels"))
    (held,) = (line for line in result.stdout.splitlines() if line.startswith("quantised weights"))
    assert ("dequantised:" in held) == (" off:" in line)
    assert "off: CXX names no-such-compiler" in line
