"""Tests gpu.sh on a CPU with the smallest sizes, and the calculation of its lower bounds."""

import os
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu.idle import idle_share

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"


def call(*command: object, **variables: str) -> subprocess.CompletedProcess:
    paths = [str(ROOT), str(ROOT / "plugins"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **variables}
    words = [str(word) for word in command]
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=240)


def test_a_dry_run_measures_everything_and_writes_nothing():
    before = sorted(BENCHMARKS.rglob("*.json"))
    variables = {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
    done = call("bash", BENCHMARKS / "gpu.sh", "--dry-run", **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("4 of 4") == 3 and "nothing is written" in done.stdout
    for name in (
        "fused layers beside plain ones",
        "20 of 20 equal",
        "0 together, 0 as drafts, 0 in",
        "2B decode x8, batch_invariant, times as long",
        "8B prefill of 64, batch_invariant, times as long",
        "decode of 8 heads captured beside launched",
        "images captured beside launched",
        "drafts captured beside launched",
        "2B 7 drafts x1, captured",
        "2B 7 drafts x1, launched",
        "8B vision, 64 tokens launched",
        "answers of 8 heads of 128",
        "2B decode x8, context 24",
        "8B decode x8, top-p",
        "8B prefill",
        "8B vision",
        "beside generate",
        "beside continuous batching",
    ):
        assert name in done.stdout
    skipped = [line for line in done.stdout.splitlines() if line.startswith("skipped: ")]
    assert {line.split(":")[1].strip() for line in skipped} == {
        "attention flashinfer",
        "attention triton",
        "2B GPU idle in decode",
        "8B GPU idle in decode",
        "tests of the kernels",
    }
    assert sorted(BENCHMARKS.rglob("*.json")) == before


def test_what_was_brought_along_is_installed_where_the_check_finds_it(tmp_path):
    """Wheels and built kernels in the folder .whl are installed before the check runs. The test uses a
    temporary checkout with a fake check.
    """
    benchmarks, brought = tmp_path / "benchmarks", tmp_path / ".whl"
    for folder in (benchmarks / "gpu", brought / "aot" / "page"):
        folder.mkdir(parents=True)
    shutil.copy(BENCHMARKS / "gpu.sh", benchmarks)
    with zipfile.ZipFile(brought / "brought_along-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("brought_along.py", "name = 'brought'")
        wheel.writestr(
            "brought_along-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: brought_along\nVersion: 1\n"
        )
        wheel.writestr(
            "brought_along-1.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr("brought_along-1.dist-info/RECORD", "")
    (brought / "aot" / "page" / "page.so").write_bytes(b"built")
    (benchmarks / "gpu" / "setup.py").write_text("")
    (benchmarks / "gpu" / "check.py").write_text(
        "import os, sys\n"
        "from pathlib import Path\n"
        "import brought_along\n"
        "scratch = Path(brought_along.__file__).parent\n"
        "built = scratch / 'flashinfer' / 'data' / 'aot' / 'page' / 'page.so'\n"
        "norms = os.environ['FLASHINFER_USE_CUDA_NORM']\n"
        "told, seconds, *given = sys.argv[1:]\n"
        "in_time = 400 < int(seconds) <= 500\n"
        "print(brought_along.name, built.read_bytes(), told, in_time, given, norms)\n"
        "sys.exit(3)\n"
    )
    done = call("bash", benchmarks / "gpu.sh", "--seconds", "7", PYTHON=sys.executable)
    assert done.returncode == 3, done.stderr
    assert done.stdout.strip() == "brought b'built' --seconds True ['--seconds', '7'] 1"


def test_wheels_for_another_python_are_left_out(tmp_path):
    benchmarks, brought = tmp_path / "benchmarks", tmp_path / ".whl"
    (benchmarks / "gpu").mkdir(parents=True)
    brought.mkdir()
    shutil.copy(BENCHMARKS / "gpu.sh", benchmarks)
    (brought / "brought_along-1-cp27-cp27m-win32.whl").touch()
    (benchmarks / "gpu" / "setup.py").write_text("")
    (benchmarks / "gpu" / "check.py").write_text("print('went on')")
    done = call("bash", benchmarks / "gpu.sh", PYTHON=sys.executable)
    assert done.returncode == 0 and done.stdout.strip() == "went on"
    assert "not for this Python" in done.stderr


def test_a_checkout_gets_entry_points_where_none_are_installed(module, tmp_path, monkeypatch):
    gpu_setup = module("gpu.setup")
    monkeypatch.setattr(gpu_setup.metadata, "entry_points", lambda group: ())
    assert gpu_setup.main(tmp_path) == 0
    found = [metadata.PathDistribution(folder) for folder in tmp_path.glob("*.dist-info")]
    points = {(point.group, point.name): point.value for point in found[0].entry_points}
    assert len(found) == 1 and points["mmengine.models", "qwen3_vl"] == "mmengine_qwen3_vl:plugin"


def test_what_is_missing_is_named_with_the_way_to_bring_it(module, tmp_path, monkeypatch, capsys):
    gpu_setup = module("gpu.setup")
    # zstandard is too old; msgspec and av are missing.
    there = {"zstandard": "0.22.9", "msgspec": None, "av": None}

    def version(name):
        if there.get(name, "99.0.0+cu130") is None:
            raise metadata.PackageNotFoundError(name)
        return there.get(name, "99.0.0+cu130")

    monkeypatch.setattr(gpu_setup.metadata, "version", version)
    assert gpu_setup.main(tmp_path) == 1
    told = capsys.readouterr().err
    assert "missing here, or too old: 'msgspec>=0.19' 'zstandard>=0.23'. " in told
    assert told.count("gpu_bring.py --python 3.") == 1 and "msgspec zstandard\n" in told
    assert not list(tmp_path.iterdir())


def test_what_is_brought_along_is_of_the_versions_asked_for(module, monkeypatch, tmp_path):
    """gpu_bring.py asks pip for FlashInfer and for the project's version ranges, for the given Python."""
    gpu_bring, asked = module("gpu_bring"), []
    monkeypatch.setattr(gpu_bring, "FOLDER", tmp_path / ".whl")
    monkeypatch.setattr(gpu_bring.subprocess, "run", lambda words, check: asked.extend(words))
    monkeypatch.setattr(sys, "argv", ["gpu_bring.py", "--python", "3.13"])
    assert gpu_bring.main() == 0
    assert asked[-6:] == [
        *("llguidance>=1.9,<2", "msgspec>=0.19", "structlog>=24.1", "zstandard>=0.23"),
        *gpu_bring.FLASHINFER,
    ]
    assert asked[asked.index("--python-version") + 1] == "3.13" and "manylinux_2_31_x86_64" in asked


def test_a_wheel_is_brought_without_what_is_never_called(module, tmp_path):
    # `slim` removes unused kernels from FlashInfer's wheel, and their lines from RECORD.
    kept = {
        "flashinfer/__init__.py": "name = 'kept'",
        "flashinfer/experimental/kept.py": "",
        "flashinfer/data/csrc/norm.cu": "",
        "flashinfer/data/cutlass/include/cutlass.h": "",
        "flashinfer-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: flashinfer\nVersion: 1\n",
        "flashinfer-1.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    left_out = [
        "flashinfer/experimental/kernel.cu",
        "flashinfer/data/csrc/kda/kernel.cu",
        "flashinfer/data/cutlass/examples/one.cu",
    ]
    path = tmp_path / "flashinfer-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in (kept | dict.fromkeys(left_out, "x")).items():
            wheel.writestr(name, text)
        record = "".join(f"{name},sha256=0,1\n" for name in (*kept, *left_out))
        wheel.writestr("flashinfer-1.dist-info/RECORD", record)
    module("gpu_bring").slim(path)
    with zipfile.ZipFile(path) as wheel:
        assert set(wheel.namelist()) == {*kept, "flashinfer-1.dist-info/RECORD"}
        record = wheel.read("flashinfer-1.dist-info/RECORD").decode().splitlines()
    assert [line.split(",")[0] for line in record] == list(kept)


def test_answers_part_where_their_tokens_do(module):
    # An answer has tokens, and each token's gap between the two best logprobs. Each answer that differs is
    # reported with its first different token and that token's gap. If one answer only ends earlier, its last
    # token is reported.
    wanted = [([5, 6, 7], [9.0, 0.25, 8.0]), ([1, 2], [3.0, 0.5]), ([4], [1.0])]
    got = [([5, 8, 7], []), ([1, 2, 3], []), ([4], [])]
    parted = module("gpu.tokens").compare_answers(wanted, got)
    assert parted == [{"request": 0, "token": 1, "gap": 0.25}, {"request": 1, "token": 1, "gap": 0.5}]


@pytest.mark.parametrize(
    "size, weights, kv, prefill, vision", [("2B", 3.44, 112, 30.8, 4.36), ("8B", 15.14, 144, 134, 5.80)]
)
def test_floors_are_those_of_the_shapes(module, size, weights, kv, prefill, vision):
    """Compare the roofline's amounts with hand calculations: GB of weights, KiB of KV per token, TFLOP for
    8,192 tokens, and TFLOP for an image.
    """
    floors, shape = module("gpu.roofline"), module("gpu.shapes").SHAPES[size]
    assert floors.decode_bytes(shape, 0, 0) / 1e9 == pytest.approx(weights, rel=0.01)
    more = floors.decode_bytes(shape, 2, 1024) - floors.decode_bytes(shape, 0, 0)
    assert more == 2 * 1024 * kv * 1024
    assert floors.prefill_flops(shape, 8192) / 1e12 == pytest.approx(prefill, rel=0.01)
    assert floors.vision_flops(shape, (1, 64, 64)) / 1e12 == pytest.approx(vision, rel=0.01)


def test_the_weights_counted_are_the_weights_there_are(module):
    """The roofline's bytes for a decode step equal the size of the model's matrices, without norms and
    embedding.
    """
    shapes, floors = module("gpu.shapes"), module("gpu.roofline")
    for shape in shapes.SHAPES.values():
        shape = shapes.reduced(shape)
        read = [
            dims[0] * dims[1]
            for name, dims in shapes.expected_tensors(shape).items()
            if name.startswith(("text.layers", "lm_head")) and len(dims) == 2
        ]
        assert floors.decode_bytes(shape, 0, 0) == 2 * sum(read)


def test_a_goal_is_met_by_its_fraction(module):
    goal = module("gpu.roofline").Goal
    assert goal.of_time(0.010, 0.007, 0.7).met and not goal.of_time(0.010, 0.0069, 0.7).met
    assert goal.of_time(0.010, 0.001, None).met is None
    rival = goal.of_rival(500.0, 100.0, 5.0)
    assert rival.met and not goal.of_rival(499.0, 100.0, 5.0).met
    assert rival.as_dict() == {
        "measured": 500.0,
        "floor": 100.0,
        "fraction": 5.0,
        "met": True,
        "wanted": 5.0,
        "unit": "tokens/s",
    }


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), min_size=1, max_size=12))
def test_idle_is_what_no_kernel_covers(spans):
    spans = [(begin, begin + length) for begin, length in spans]
    covered = {tick for begin, end in spans for tick in range(begin, end)}
    whole = max(end for _, end in spans) - min(begin for begin, _ in spans)
    assert idle_share(spans) == pytest.approx(1 - len(covered) / whole)


def test_steps_that_are_captured_wrongly_are_found_out(module, monkeypatch):
    graphs = module("gpu.graphs")
    assert graphs.compare_graphs("cpu", graphs.torch.float32, 4).right
    assert graphs.compare_encoder_graphs("cpu", graphs.torch.float32, 96).right
    drafts = module("gpu.drafts")
    assert drafts.compare_chains("cpu", graphs.torch.float32).right
    monkeypatch.setattr(graphs.EagerRecorder, "record", lambda self, compute: lambda: None)
    assert not drafts.compare_chains("cpu", graphs.torch.float32).right
    assert not graphs.compare_graphs("cpu", graphs.torch.float32, 4).right
    assert not graphs.compare_encoder_graphs("cpu", graphs.torch.float32, 96).right
