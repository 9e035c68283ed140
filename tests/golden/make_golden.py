"""Writes the golden log of a format: python -m tests.golden.make_golden NAME

Run once for a format, and commit the folder. It is never written again: a build that cannot read
it, folds it to another digest, or derives other decisions under the same decision version is wrong.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from mmengine.replay import request_lines, step_lines, verify
from tests.replay.runs import busy_run

HERE = Path(__file__).parent


def expected(folder: Path, digest: bytes) -> dict:
    """What a log must give for ever."""
    report = verify(folder)
    lines = [asdict(line) for line in request_lines(folder)]
    return {
        "digest": digest.hex(),
        "decision_version": report.logged_version,
        "events": report.events,
        "steps": report.steps,
        "tokens": report.tokens,
        "checkpoints": report.checkpoints,
        "step_lines": [list(asdict(line).values()) for line in step_lines(folder)],
        "requests": [{name: line[name] for name in line if not name.endswith("_ns")} for line in lines],
    }


def main(name: str) -> None:
    folder = HERE / name
    live = busy_run(folder, seed=5, num_requests=60)
    (folder / "lock").unlink()
    text = json.dumps(expected(folder, live.core.state.digest()), separators=(",", ":"))
    (folder / "expected.json").write_text(text + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
