"""Prints the versions of all installed distributions and the output of `pip check`, as JSON."""

import json
import subprocess
import sys
from importlib.metadata import distributions

if __name__ == "__main__":
    found = {each.metadata["Name"].lower(): each.version for each in distributions()}
    check = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    print(json.dumps({"versions": found, "check": check.stdout}))
