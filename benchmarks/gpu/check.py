"""Check that `--device cuda` computes correctly and measure how near it comes to the device's limits.

gpu.sh calls this program. It has not yet run on a GPU.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import date
from functools import partial
from pathlib import Path

from benchmarks.common.report import Table, markdown, show
from benchmarks.gpu import parts, speed_parts, transformers_parts
from benchmarks.gpu.run import Run

RESULTS = Path(__file__).resolve().parents[1] / "results"
COMPILING = 240.0  # maximum seconds to wait for FlashInfer's compiler


def main() -> int:
    parser = argparse.ArgumentParser(description="Check and measure --device cuda.")
    parser.add_argument("--dry-run", action="store_true", help="run everything on the CPU, with small sizes")
    parser.add_argument("--seconds", type=float, default=470.0, help="total time limit (default 470)")
    parser.add_argument("--out", type=Path, help="JSON file (default: results/gpu_<device>.json)")
    options = parser.parse_args()
    run = Run(options.dry_run, time.monotonic() + options.seconds, options.out)
    with tempfile.TemporaryDirectory() as folder:
        help_compiler(Path(folder))
        problem = begin(run)
        if problem is not None:
            print(problem, file=sys.stderr)
            return 1
        return check(run)


def check(run: Run) -> int:
    """Run all parts, then print and write their results."""
    print(f"{run.facts['device']}: correctness, then speed with random weights; TF32 is off")
    try:
        everything(run)
    except KeyboardInterrupt:
        run.failed["the remaining parts"] = "cut off by a signal"
    finally:
        run.stop()
        run.write()
    unsaid = [f"skipped: {name}: {why}" for name, why in run.skipped.items()]
    unsaid += [f"FAILED: {name}: {why}" for name, why in run.failed.items()]
    show(tables(run), unsaid)
    if run.out is None:
        print("dry run: nothing is written; not yet run on a GPU")
    else:
        said = run.out.with_suffix(".md")
        lines = [f"{run.facts['date']}, Python {run.facts['python']}, torch {run.facts['torch']}", *unsaid]
        said.write_text(markdown(f"{run.facts['device']}", tables(run), lines), encoding="utf-8")
        print(f"written: {run.out} and {said.name}")
    return 0 if run.is_right else 1


def help_compiler(folder: Path) -> None:
    """Let FlashInfer's compiler find cublasLt.h and libcuda.so.

    A CUDA toolkit that has only the compiler lacks both files. torch's packages contain the header. An empty
    library is linked in place of the driver's libcuda.so.
    """
    folders = [each for entry in sys.path for each in Path(entry).glob("nvidia/*/include")]
    _look_behind("CPATH", [each for each in folders if (each / "cublasLt.h").is_file()])
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is not None:
        empty = folder / "libcuda.so"  # only for linking; the driver's library is loaded at run time
        words = ("-shared", "-x", "c", os.devnull, "-Wl,-soname,libcuda.so.1", "-o", str(empty))
        done = subprocess.run([compiler, *words], capture_output=True)
        _look_behind("LIBRARY_PATH", [folder] if done.returncode == 0 else [])


def _look_behind(variable: str, folders: list[Path]) -> None:
    given = [os.environ[variable]] if os.environ.get(variable) else []
    if folders:
        os.environ[variable] = os.pathsep.join([*given, *map(str, folders)])


def begin(run: Run) -> str | None:
    """Query the device and choose the JSON file.

    Returns an error message if no device can be used, else None.
    """
    run.facts["date"] = str(date.today())
    run.part("the device", 20, parts.device)
    why = "; ".join([*run.skipped.values(), *run.failed.values()])
    if "fork" in why:  # the parent has loaded CUDA (a bug), so a forked child cannot use it
        run.start = "spawn"
        run.skipped.clear()
        run.failed.clear()
        run.part("the device", 20, parts.device)
        why = "; ".join([*run.skipped.values(), *run.failed.values()])
    if "device" not in run.facts:
        return f"no GPU can be used: {why}. Use --dry-run to run on the CPU"
    if run.out is None and not run.dry:
        name = re.sub(r"[^a-z0-9]+", "_", str(run.facts["device"]).lower()).strip("_")
        run.out = RESULTS / f"gpu_{name}.json"
    return None


def everything(run: Run) -> None:
    """Run all parts, the most important first. FlashInfer is compiled while the first parts run.

    The number in each `run.part` call estimates the part's seconds on an H100, with the process start.
    """
    began = time.monotonic()
    compiled = [run.begin(f"compiling {name}", work) for name, work in parts.compiling(run.dry).items()]
    run.part("rates of the device", 10, speed_parts.rates)
    run.part("tokens", 40, parts.tokens)
    run.part("tokens beside transformers", 40, parts.tokens_beside_transformers)
    well = [run.end(going, max(0.0, began + COMPILING - time.monotonic())) for going in compiled]
    if not all(well):  # a failed compilation is not tried again in every later part
        os.environ["FLASHINFER_DISABLE_JIT"] = "1"
    run.part("attention backends", 40, parts.backends)
    run.part("kernels", 20, parts.kernels)
    run.part("captured steps", 25, parts.captured)
    run.part("tokens of a wide model", 25, parts.wide)
    speed(run)
    run.part("bits", 25, parts.bits)
    for name, seconds in (("2B", 20), ("8B", 40)):
        run.part(f"{name} with batch_invariant", seconds, partial(speed_parts.invariant, name, run.facts))
        speed_parts.compare_invariant_times(run, name)
    run.part("tests of the kernels", 60, parts.tests)


def speed(run: Run) -> None:
    for name, seconds in (("2B", (30, 20, 20)), ("8B", (60, 25, 25))):
        run.part(f"{name} decode", seconds[0], partial(speed_parts.decode, name, run.facts))
        run.part(f"{name} prompts and images", seconds[1], partial(speed_parts.prompts, name, run.facts))
        run.part(f"{name} GPU idle in decode", seconds[2], partial(speed_parts.idle, name))
        if name == "2B":
            run.part("2B drafts", 15, partial(speed_parts.drafts, name, run.facts))
            run.part("2B by mmengine", 25, partial(transformers_parts.ours, name))
            run.part("2B by transformers' generate", 45, partial(transformers_parts.by_generate, name))
            rival = partial(transformers_parts.by_continuous_batching, name)
            run.part("2B by transformers' continuous batching", 60, rival)
            transformers_parts.beside(run, name)


def tables(run: Run) -> list[Table]:
    checks = Table("Correctness", ("", "found", "right"))
    for one in run.checks.values():
        checks.rows.append((one.name, one.said, "yes" if one.right else "NO"))
        checks.notes += one.notes
    goals = Table(
        f"Speed on {run.facts['device']}",
        ("", "measured", "bound or transformers", "fraction", "wanted", "met"),
    )
    for name, goal in run.goals.items():
        met = "" if goal.met is None else "yes" if goal.met else "NO"
        wanted = "" if goal.wanted is None else f"{goal.wanted:g}"
        figures = f"{goal.measured:.4g} {goal.unit}", f"{goal.floor:.4g}", f"{goal.fraction:.3f}"
        goals.rows.append((name, *figures, wanted, met))
    for name in ("copy_gb_per_s", "matmul_tflops"):
        if name in run.facts:
            goals.notes.append(f"{name.replace('_', ' ')}: {run.facts[name]:.1f}")
    for name in ("attention", "attention of images", "layer operations", "sampling"):
        goals.notes.append(f"{name} by: {run.facts.get(name, 'unknown')}")
    if run.dry:
        goals.notes.append("Figures at these sizes predict neither a GPU nor this CPU.")
    goals.notes += [f"{name}: {value}" for name, value in run.facts.items() if name[:3] in ("2B ", "8B ")]
    return [checks, goals]


if __name__ == "__main__":
    sys.exit(main())
