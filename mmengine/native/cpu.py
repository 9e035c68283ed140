"""Which of our instruction sets this CPU has."""

import os
import platform
from pathlib import Path

from mmengine.native.problem import NativeProblem

_VECTOR = {"avx2", "fma", "f16c"}
_AVX512 = _VECTOR | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
_AVX512_BF16 = _AVX512 | {"avx512_bf16", "avx512vbmi", "avx512_vnni"}
# From the least to the best: what /proc/cpuinfo must name for each.
NEEDS = {
    "avx2": _VECTOR,
    "avx512": _AVX512,
    "avx512_bf16": _AVX512_BF16,
    "amx": _AVX512_BF16 | {"amx_tile", "amx_bf16"},
}
CHOICE = "MMENGINE_NATIVE_ISA"


def usable_isas() -> list[str]:
    """The instruction sets of this CPU, best first; those above the one that MMENGINE_NATIVE_ISA names are
    left out. Raises NativeProblem where there is none, or the variable names none."""
    flags = cpu_flags()
    have = [isa for isa, needed in NEEDS.items() if needed <= flags]
    if not have:
        raise NativeProblem(f"this CPU ({platform.machine()}) has no AVX2, which is the least they use")
    chosen = os.environ.get(CHOICE, "")
    if chosen:
        if chosen not in NEEDS:
            raise NativeProblem(f"{CHOICE}={chosen[:40]} names no instruction set; use {', '.join(NEEDS)}")
        if chosen not in have:
            raise NativeProblem(f"{CHOICE}={chosen} was asked for, and this CPU does not have it")
        have = have[: have.index(chosen) + 1]
    return have[::-1]


def cpu_flags() -> frozenset[str]:
    """The flags that Linux gives for the first core; empty where it does not say."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()
