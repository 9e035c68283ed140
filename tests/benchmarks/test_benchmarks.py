"""The benchmarks run, on the smallest of settings; what they measure is not looked at."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"


def call(*command: object, **variables: str) -> subprocess.CompletedProcess:
    paths = [str(ROOT), str(ROOT / "plugins"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **variables}
    words = [str(word) for word in command]
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=240)


def test_gpu_check_dry_run_writes_nothing():
    before = sorted(BENCHMARKS.rglob("*.json"))
    done = call("bash", BENCHMARKS / "gpu.sh", "--dry-run", PYTHON=sys.executable, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert "4 of 4" in done.stdout and "nothing is written" in done.stdout
    assert sorted(BENCHMARKS.rglob("*.json")) == before


def test_gpu_check_says_in_one_line_that_there_is_no_gpu():
    done = call("bash", BENCHMARKS / "gpu.sh", PYTHON=sys.executable, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert done.stderr.strip().count("\n") == 0 and "no GPU" in done.stderr


def test_a_checkout_gets_entry_points_where_none_are_installed(module, tmp_path, monkeypatch):
    gpu_setup = module("gpu_setup")
    monkeypatch.setattr(gpu_setup.metadata, "entry_points", lambda group: ())
    assert gpu_setup.main(tmp_path) == 0
    found = [metadata.PathDistribution(folder) for folder in tmp_path.glob("*.dist-info")]
    points = {(point.group, point.name): point.value for point in found[0].entry_points}
    assert len(found) == 1 and points["mmengine.models", "qwen3_vl"] == "mmengine_qwen3_vl:plugin"


def test_what_is_missing_is_named_with_the_way_to_bring_it(module, tmp_path, monkeypatch, capsys):
    gpu_setup = module("gpu_setup")
    monkeypatch.setattr(gpu_setup, "_installed", lambda name: name not in ("msgspec", "av"))
    assert gpu_setup.main(tmp_path) == 1
    told = capsys.readouterr().err
    assert "missing here: msgspec. " in told and "pip download" in told and not list(tmp_path.iterdir())


def test_answers_part_where_their_tokens_do(module):
    wanted = [([5, 6, 7], [9.0, 0.25, 8.0]), ([1, 2], [3.0, 0.5]), ([4], [1.0])]
    got = [([5, 8, 7], []), ([1, 2, 3], []), ([4], [])]
    partings = module("gpu_check").compare_answers(wanted, got)
    assert partings == [{"request": 0, "token": 1, "gap": 0.25}, {"request": 1, "token": 1, "gap": 0.5}]


def test_rounds_take_turns_and_give_medians(module):
    measure = module("measure")
    order, ticks = [], []
    variants = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    rounds = measure.Rounds().run(variants, 3, lambda: ticks.append(1))
    assert "".join(order) == "abbaab" and len(ticks) == 6
    rounds.samples = {"a": [measure.Sample(wall, 10 - wall) for wall in (2, 30, 4)]}
    assert rounds.wall("a") == 4 and rounds.cpu("a") == 6
