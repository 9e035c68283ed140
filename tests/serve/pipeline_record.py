"""Record transformers' results for the calls in pipeline_calls.py, for tests that run only our pipeline.

    python -m tests.serve.pipeline_record     writes pipeline_record.json

`make soak` compares the record with transformers. The record contains only digests. To see the results
themselves, run pipeline_sides.py with the call.
"""

import hashlib
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from tests.serve.pipeline_calls import CALLS
from tests.serve.pipeline_sides import ROOT

RECORD = Path(__file__).with_name("pipeline_record.json")
# Packages that may change tokens or pictures.
PACKAGES = ("transformers", "torch", "pillow", "av")


def both_sides(codes):
    """Run pipeline_sides.py in another process, and return its output. A new process is needed, because
    transformers checks for torchvision only when it is imported.
    """
    command = [sys.executable, "-m", "tests.serve.pipeline_sides"]
    done = subprocess.run(
        command, input=json.dumps(codes), capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def versions():
    """Return the packages' versions and the included checkpoint's digest."""
    import mmengine_shapes

    digest = hashlib.sha256()
    for path in sorted(Path(mmengine_shapes.checkpoint_path()).iterdir()):
        digest.update(path.read_bytes())
    return {**{name: version(name) for name in PACKAGES}, "checkpoint": digest.hexdigest()[:16]}


def read():
    return json.loads(RECORD.read_text())


def main():
    found = both_sides([call.code for call in CALLS])
    calls = {code: theirs for code, (*_, theirs) in found.items()}
    RECORD.write_text(json.dumps({"versions": versions(), "calls": calls}, indent=1) + "\n")


if __name__ == "__main__":
    main()
