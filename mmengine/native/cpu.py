"""Detects which of the kernels' instruction sets this CPU has."""

import os
import platform
from pathlib import Path

from mmengine.native.errors import NativeKernelsError

_VECTOR = {"avx2", "fma", "f16c"}
_AVX512 = _VECTOR | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
_AVX512_BF16 = _AVX512 | {"avx512_bf16", "avx512vbmi", "avx512_vnni"}
# Instruction sets from slowest to fastest, each with the flags that /proc/cpuinfo must list.
NEEDS = {
    "avx2": _VECTOR,
    "avx512": _AVX512,
    "avx512_bf16": _AVX512_BF16,
    "amx": _AVX512_BF16 | {"amx_tile", "amx_bf16"},
}
CHOICE = "MMENGINE_NATIVE_ISA"


def usable_isas() -> list[str]:
    """Return the supported instruction sets of this CPU, fastest first. MMENGINE_NATIVE_ISA may name the
    fastest set to use.

    Raises NativeKernelsError if the CPU has no supported set, or if MMENGINE_NATIVE_ISA names an unknown set
    or a set that the CPU lacks.
    """
    flags = cpu_flags()
    have = [isa for isa, needed in NEEDS.items() if needed <= flags]
    if not have:
        raise NativeKernelsError(f"this CPU ({platform.machine()}) has no AVX2, which the kernels require")
    chosen = os.environ.get(CHOICE, "")
    if chosen:
        if chosen not in NEEDS:
            raise NativeKernelsError(
                f"{CHOICE}={chosen[:40]} is not an instruction set; use {', '.join(NEEDS)}"
            )
        if chosen not in have:
            raise NativeKernelsError(
                f"{CHOICE}={chosen} is set, but this CPU does not have it; unset it or choose a lower one"
            )
        have = have[: have.index(chosen) + 1]
    return have[::-1]


def cpu_flags() -> frozenset[str]:
    """Return the first core's flags from /proc/cpuinfo, or an empty set if there are none."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()
