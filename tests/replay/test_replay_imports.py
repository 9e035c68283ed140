"""Tests that replay imports no model code, device code or nondeterministic modules."""

import subprocess
import sys

from tests.replay.runs import busy_run

PROGRAM = """
import builtins, pathlib, sys

BLOCKED = ("torch", "transformers", "llguidance", "torchvision", "safetensors", "PIL", "av", "tokenizers")
NEVER_OURS = ("asyncio", "threading", "random", "secrets", "concurrent", "multiprocessing", "socket")


class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ImportError(f"{name} is blocked")


asked, real = [], builtins.__import__


def watched(name, globals=None, locals=None, fromlist=(), level=0):
    if globals and globals.get("__name__", "").startswith("mmengine") and not level:
        asked.append((globals["__name__"], name.partition(".")[0]))
    return real(name, globals, locals, fromlist, level)


sys.meta_path.insert(0, Blocker())
builtins.__import__ = watched
folder = pathlib.Path(sys.argv[1])
import mmengine.replay
report = mmengine.replay.verify(folder)
lines = mmengine.replay.request_lines(folder)
steps = list(mmengine.replay.step_lines(folder))
assert asked, "the watch works"
wrong = sorted({pair for pair in asked if pair[1] in (*BLOCKED, *NEVER_OURS)})
assert not wrong, wrong
assert not [name for name in sys.modules if name.partition(".")[0] in BLOCKED]
print(report.ok, len(lines), len(steps))
"""


def test_replay_with_heavy_modules_blocked(tmp_path):
    live = busy_run(tmp_path / "log", num_requests=8)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "log")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", str(len(live.queued)), str(len(live.steps))]
