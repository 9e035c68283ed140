"""Compiles the C++ sources of the CPU kernels into a shared library."""

import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mmengine.native.errors import NativeKernelsError

SOURCES = Path(__file__).parent / "src"
BUILT = Path(__file__).parent / "built"  # libraries that a wheel contains
NAMES = ("c++", "g++", "clang++")
TIME_LIMIT_S = 120.0  # per source file; a file usually takes a few seconds
_log = logging.getLogger("mmengine.native")
_LIMIT_NAME = "MMENGINE_NATIVE_TIMEOUT_S"

_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
_AVX512_BF16 = (*_AVX512, "-mavx512bf16", "-mavx512vbmi", "-mavx512vnni")
_ISA_FLAGS = {
    # Align loops to cache lines. With random alignment, a quantised layer with one row can be up to a fifth
    # slower.
    "avx2": (*_AVX2, "-falign-loops=64"),
    "avx512": _AVX512,
    "avx512_bf16": _AVX512_BF16,
    "amx": (*_AVX512_BF16, "-mamx-tile", "-mamx-bf16"),
}
# -ffast-math is off because it lets the compiler ignore NaN. NaN must reach the logits, because a request
# with NaN must get an error.
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-ffp-contract=fast", "-Wno-psabi")


def find_compiler() -> str:
    """Return $CXX, or the first C++ compiler on the path. Raises NativeKernelsError."""
    chosen = os.environ.get("CXX", "").strip()
    for name in (chosen,) if chosen else NAMES:
        found = shutil.which(name)
        if found:
            return found
    wanted = f"CXX names {chosen[:100]}, which does not exist" if chosen else "there is no C++ compiler"
    raise NativeKernelsError(f"{wanted}; install g++ (Debian, Ubuntu: apt install g++)")


def source_files() -> list[Path]:
    return sorted(SOURCES.rglob("*.cpp"))


def header_files() -> list[Path]:
    return sorted(SOURCES.rglob("*.h"))


def all_flags(isa: str, openmp: Path | None) -> list[str]:
    return [*_FLAGS, *_ISA_FLAGS[isa], *(["-fopenmp"] if openmp else [])]


def openmp_library() -> Path | None:
    """Return the path of the OpenMP runtime that torch contains.

    The kernels link to this runtime. With a second runtime, the idle threads of one thread pool would spin
    while the other pool works.
    """
    import torch  # imported here, because torch is slow to load

    found = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    found += sorted((Path(torch.__file__).parent.parent / "torch.libs").glob("libgomp*.so*"))
    return found[0] if found else None


def compile_library(compiler: str, isa: str, openmp: Path | None, out: Path) -> None:
    """Write the library for `isa` to `out`. Raises NativeKernelsError."""
    _log.warning(
        "compiling CPU kernels with %s, once for this machine; this takes about ten seconds",
        Path(compiler).name,
    )
    _compile(compiler, all_flags(isa, openmp), [str(openmp)] if openmp else [], out)


def compile_for_wheel(compiler: str, isa: str, out: Path) -> None:
    """Write the library for `isa` to `out` without linking an OpenMP runtime. Raises NativeKernelsError.

    The target machine's OpenMP runtime is unknown, so OpenMP functions are resolved at loading.
    """
    _compile(compiler, wheel_flags(isa), [], out)


def wheel_flags(isa: str) -> list[str]:
    return [*_FLAGS, *_ISA_FLAGS[isa], "-fopenmp"]


def _compile(compiler: str, flags: Sequence[str], linked: Sequence[str], out: Path) -> None:
    limit = _time_limit()
    # Compile next to the result. In $TMPDIR, other users could replace object files before linking.
    with tempfile.TemporaryDirectory(prefix="compiling-", dir=out.parent) as folder:
        objects = [Path(folder) / f"{number}.o" for number in range(len(source_files()))]
        commands = [
            [compiler, *flags, f"-I{SOURCES}", "-c", str(source), "-o", str(made)]
            for source, made in zip(source_files(), objects, strict=True)
        ]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(lambda command: _run(command, limit), commands))
        _run([compiler, "-shared", "-o", str(out), *map(str, objects), *linked], limit)


def _time_limit() -> float:
    try:
        return float(os.environ.get(_LIMIT_NAME, TIME_LIMIT_S))
    except ValueError:
        return TIME_LIMIT_S


def _run(command: Sequence[str], seconds: float) -> None:
    name = Path(command[0]).name
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise NativeKernelsError(f"the compiler {name} did not finish within {seconds:.0f} s") from None
    except OSError as error:
        raise NativeKernelsError(f"the compiler {name} does not start: {error.strerror or error}") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise NativeKernelsError(f"the compiler {name} failed: {(lines or ['without a message'])[0][:200]}")
