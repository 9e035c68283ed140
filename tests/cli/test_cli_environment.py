"""Tests the warning about environment variables that nothing reads."""

import os

import pytest

from mmengine.cli.environment import unknown_variables
from tests.cli.cli_process import call_cli


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("MMENGINE_PROT", "did you mean MMENGINE_PORT?"),
        ("MMENGINE_API_KEYS", "did you mean MMENGINE_API_KEY?"),
        ("MMENGINE_NATIV", "did you mean MMENGINE_NATIVE?"),
        ("MMENGINE_MAX_DIGIT", "did you mean MMENGINE_MAX_DIGITS?"),
        ("MMENGINE_MAX_NUM_SEQS", "use --set max_num_seqs=…, or MMENGINE_SET=max_num_seqs=…"),
        ("MMENGINE_GPU_MEMORY_UTILIZATION", "use --set num_blocks=N"),
        ("MMENGINE_SWAP_BLOCKZ", "did you mean swap_blocks?"),
    ],
)
def test_a_misspelt_variable_is_named_with_advice(name: str, advice: str) -> None:
    text = unknown_variables(["PATH", name, "MMENGINE_PORT"])
    assert text.startswith(f"nothing reads this environment variable: {name} (") and advice in text


def test_variables_that_are_read_get_no_warning() -> None:
    known = ["MMENGINE_PORT", "MMENGINE_SET", "MMENGINE_HUB", "MMENGINE_CACHE", "MMENGINE_LOG_CONTENT"]
    assert not unknown_variables([*known, "PATH", "_MMENGINE_COMPLETE", "MMENGINEX"])
    links = ["MMENGINE_SERVICE_HOST", "MMENGINE_SERVICE_PORT_HTTP", "MMENGINE_PORT_8000_TCP_ADDR"]
    assert not unknown_variables(links), "Kubernetes sets them for a service with this name"


def test_a_command_warns_once_about_all_variables() -> None:
    odd = {f"MMENGINE_ODD_{n}": "1" for n in range(12)}
    result = call_cli("--version", env={**os.environ, **odd, "MMENGINE_QQ": "secret value"})
    assert result.returncode == 0
    (line,) = [each for each in result.stderr.splitlines() if "warning" in each]
    assert "these environment variables: MMENGINE_ODD_0, " in line and line.endswith("and 3 more")
    assert "secret" not in line
    quiet = call_cli("--version", env={**os.environ, **odd, "MMENGINE_SUPERVISED_BY": "1"})
    assert "nothing reads" not in quiet.stderr, "the supervisor has warned"
