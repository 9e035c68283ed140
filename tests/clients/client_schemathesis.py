"""Runs schemathesis on the OpenAPI document. No call may get status 500, and all answers must match the
document.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

from checks import BASE, check, run

SECONDS = int(os.environ.get("SCHEMATHESIS_S", "60"))


@check("errors: whatever its description allows, and what it does not")
def schemathesis():
    command = Path(sys.executable).with_name("schemathesis")
    address = BASE.removesuffix("/v1") + "/openapi.json"
    options = ("--max-time", str(SECONDS), "--max-examples", "100000", "--continue-on-failure", "--no-color")
    config = ("--config-file", str(Path(__file__).with_name("schemathesis.toml")))
    ran = subprocess.run([command, *config, "run", address, *options], capture_output=True, text=True)
    found = re.search(r"(\d+) generated", ran.stdout)
    assert ran.returncode == 0, ran.stdout[ran.stdout.find("= FAILURES =") :][:2500] + ran.stderr[:500]
    assert found and int(found[1]) > 100, ran.stdout[-500:]
    assert re.search(r"Selected: (\d+)/\1\s+Tested: \1\b", ran.stdout), ran.stdout[-1500:]


run()
