"""Tests that the GPU check runs its parts in separate processes, so that a failing part does not affect the
rest.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.benchmarks.test_gpu import call


@pytest.fixture
def run(module, tmp_path):
    made = module("gpu.run").Run(False, time.monotonic() + 600, tmp_path / "found.json")
    yield made
    made.stop()


def ok(tell):
    tell.fact("done", tell.device)


def breaks(tell):
    tell.fact("before", 1)
    raise RuntimeError("out of memory\nand pages more")


def dies(tell):
    tell.fact("before", 1)
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(tell):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    tell.fact("before", os.getpid())
    time.sleep(600)


def test_a_part_that_breaks_or_dies_ends_alone(run, tmp_path):
    for name, work in (("broken", breaks), ("dead", dies), ("good", ok)):
        run.part(name, 1, work)
    assert run.facts == {"before": 1, "done": "cuda"} and not run.is_right
    assert run.failed == {
        "broken": "RuntimeError: out of memory",
        "dead": "its process ended with exit code -9 (negative: a signal)",
    }
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["failed"] == run.failed and set(found["seconds"]) == {"broken", "dead", "good"}


def test_a_part_without_time_is_skipped(run):
    run.part("too long", 1e6, ok)
    assert not run.facts and run.is_right and "s are left" in run.skipped["too long"]


def test_a_part_that_hangs_is_cut_off_with_what_it_started(run):
    going = run.begin("stuck", hangs)
    assert going.pipe.poll(60)  # Wait until the part has reported something.
    assert not run.end(going, 0.0)
    assert run.failed == {"stuck": "cut off: time limit reached"}
    with pytest.raises(ProcessLookupError):
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:  # Wait until no process of the part's group is left.
            os.killpg(run.facts["before"], 0)
            time.sleep(0.05)


def test_a_part_runs_beside_others_until_it_is_waited_for(run):
    going = run.begin("beside", ok)
    run.part("other", 1, breaks)
    assert "done" not in run.facts
    assert run.end(going, 60) and run.facts["done"] == "cuda"


def test_without_a_gpu_it_says_so_in_one_line_and_loads_no_cuda_before():
    """Importing the check does not initialize CUDA, so that forked processes can use CUDA."""
    code = (
        "import sys, threading, torch\n"
        "def touched(*_): raise SystemExit('CUDA is asked for something')\n"
        "names = [(torch.cuda, 'is_available'), (torch.cuda, 'device_count'), (torch.cuda, '_lazy_init')]\n"
        "names += [(torch._C, '_cuda_getDeviceCount')] if hasattr(torch._C, '_cuda_getDeviceCount') else []\n"
        "kept = [getattr(*name) for name in names]\n"
        "for name in names: setattr(*name, touched)\n"
        "import benchmarks.gpu.check\n"
        "assert threading.active_count() == 1\n"
        "for name, value in zip(names, kept): setattr(*name, value)\n"
        "sys.exit(benchmarks.gpu.check.main())\n"
    )
    done = call(sys.executable, "-c", code, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1, done.stderr
    assert "no GPU can be used" in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr


def test_where_forked_processes_cannot_have_cuda_they_load_their_modules_themselves(module, run, monkeypatch):
    """If CUDA fails in a forked process, the check starts its processes with spawn instead."""
    gpu_check, tried = module("gpu.check"), []

    def part(self, name, seconds, work):
        tried.append(self.start)
        if self.start == "fork":
            self.skipped[name] = "Cannot re-initialize CUDA in forked subprocess"
        else:
            self.facts["device"] = "NVIDIA H100 80GB HBM3"

    monkeypatch.setattr(type(run), "part", part)
    run.out = None
    assert gpu_check.begin(run) is None
    assert tried == ["fork", "spawn"] and run.start == "spawn" and not run.skipped
    assert run.out.name == "gpu_nvidia_h100_80gb_hbm3.json"


@pytest.mark.soak
def test_processes_that_load_their_modules_themselves(module, run):
    """A part also runs in a process that was started with spawn."""
    run.dry, run.start = True, "spawn"
    run.part("the device", 20, module("gpu.parts").device)
    assert run.is_right and run.facts["device"] == "cpu (dry run)"


def test_ours_are_held_against_the_best_of_theirs(module, run):
    run.facts |= {
        "2B texts, tokens/s": 900.0,
        "2B texts by continuous batching, as it chooses, tokens/s": 100.0,
        "2B texts by continuous batching, without cuDNN, tokens/s": 150.0,
        "2B images, tokens/s": 900.0,
    }
    module("gpu.transformers_parts").beside(run, "2B")
    goal = run.goals["2B texts beside continuous batching"]
    assert goal.floor == 150.0 and goal.fraction == 6.0 and goal.met
    assert "2B images beside generate" in run.skipped and len(run.goals) == 1


def test_without_rates_there_are_no_floors(module):
    with pytest.raises(Exception, match="no lower bounds"):
        module("gpu.speed_parts").decode("2B", {}, None)


def test_a_compiler_finds_what_a_toolkit_lacks(module, tmp_path, monkeypatch):
    """`help_compiler` adds the folder with cublasLt.h to CPATH and, if there is a compiler, the folder with
    an empty libcuda.so to LIBRARY_PATH.
    """
    gpu_check, compiler = module("gpu.check"), shutil.which("c++")
    for name, header in (("cu13", "cublasLt.h"), ("cudnn", "cudnn.h")):
        folder = tmp_path / "nvidia" / name / "include"
        folder.mkdir(parents=True)
        (folder / header).touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setenv("CPATH", "/usual")
    monkeypatch.setenv("LIBRARY_PATH", "")
    monkeypatch.setenv("CXX", "no-such-compiler")
    gpu_check.help_compiler(tmp_path)
    assert os.environ["CPATH"] == os.pathsep.join(["/usual", str(tmp_path / "nvidia/cu13/include")])
    assert os.environ["LIBRARY_PATH"] == ""
    if compiler is None:
        pytest.skip("no compiler here")
    monkeypatch.setenv("CXX", compiler)
    gpu_check.help_compiler(tmp_path)
    assert os.environ["LIBRARY_PATH"] == str(tmp_path)
    words = (
        "-shared",
        "-x",
        "c",
        os.devnull,
        "-Wl,--no-as-needed",
        "-lcuda",
        "-o",
        str(tmp_path / "made.so"),
    )
    subprocess.run([compiler, *words], check=True)
    assert b"libcuda.so.1" in (tmp_path / "made.so").read_bytes()


def test_what_was_found_before_a_signal_is_written(module, tmp_path, monkeypatch, capsys):
    gpu_check = module("gpu.check")

    def begin(run):
        run.facts |= {"device": "NVIDIA H100", "date": "today", "python": "3.12.3", "torch": "2.11.0"}

    def cut_off(run):
        run.goals["2B decode x1"] = module("gpu.roofline").Goal.of_time(0.001, 0.0008, 0.7)
        run.failed["tokens"] = "RuntimeError: see [/usr/lib/x.so]"
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_check, "begin", begin)
    monkeypatch.setattr(gpu_check, "everything", cut_off)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--out", str(tmp_path / "found" / "gpu.json")])
    assert gpu_check.main() == 1
    found = json.loads((tmp_path / "found" / "gpu.json").read_text())
    assert found["targets"]["2B decode x1"]["met"]
    assert found["failed"]["the remaining parts"] == "cut off by a signal"
    said = (tmp_path / "found" / "gpu.md").read_text()
    assert "| 2B decode x1 | 1 ms | 0.8 | 0.800 | 0.7 | yes |" in said and "[/usr/lib/x.so]" in said
    assert "FAILED: tokens: RuntimeError: see [/usr/lib/x.so]" in capsys.readouterr().out


@pytest.mark.parametrize("compiles", [True, False])
def test_what_cannot_be_compiled_is_not_compiled_again(module, run, monkeypatch, compiles):
    """If FlashInfer cannot be compiled, later parts run with FLASHINFER_DISABLE_JIT."""
    gpu_check, asked = module("gpu.check"), []
    monkeypatch.delenv("FLASHINFER_DISABLE_JIT", raising=False)
    monkeypatch.setattr(
        gpu_check.parts, "compiling", lambda dry: {"decode": ok, "prefill": ok if compiles else breaks}
    )
    monkeypatch.setattr(type(run), "part", lambda self, name, seconds, work: asked.append(name))
    gpu_check.everything(run)
    assert ("FLASHINFER_DISABLE_JIT" in os.environ) is not compiles
    monkeypatch.delenv("FLASHINFER_DISABLE_JIT", raising=False)
    first = asked.index("attention backends")
    assert first == 3 and asked.index("2B decode") > first and asked[-1] == "tests of the kernels"
    assert "2B texts beside continuous batching" in run.skipped
