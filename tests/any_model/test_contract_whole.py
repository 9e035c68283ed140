"""Runs the whole plugin contract for all architectures in catalogue.py.

Architectures whose processors need torchvision run in a separate process with build/torchvision, because
transformers looks for torchvision only at import.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.any_model.catalogue import NO_TORCHVISION, TEXT, TORCHVISION
from tests.any_model.hosted_contract import HostedContract, contract_of

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.soak
for _kind in (*TEXT, *NO_TORCHVISION):
    _class = contract_of(_kind)
    globals()[_class.__name__] = _class
del _class, HostedContract


def test_architectures_that_need_torchvision_pass_the_checks_of_the_table():
    if not (ROOT / "build" / "torchvision" / ".ready").exists():
        pytest.skip("needs build/torchvision, which make soak could not get")
    command = [sys.executable, "-W", "ignore", "-m", "tests.any_model.table", "--only", *TORCHVISION]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stdout
