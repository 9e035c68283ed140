"""Builds the CPU kernels into the wheel, which pyproject.toml cannot do: one library per instruction set.

    python -m build                          # an sdist, and a wheel for this platform with all kernels
    MMENGINE_WHEEL_ISAS=avx2 python -m build # only these kernels; empty: a pure wheel

Without a compiler, and on CPUs without kernels, the wheel is pure.
"""

import os
import platform
import sys
import types
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
ISAS = ("avx2", "avx512", "avx512_bf16", "amx")


def isas() -> list[str]:
    """Return the instruction sets that the wheel includes."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return []
    return [name for name in os.environ.get("MMENGINE_WHEEL_ISAS", ",".join(ISAS)).split(",") if name in ISAS]


def native() -> tuple[types.ModuleType, types.ModuleType]:
    """Return the modules that compile and name libraries, without importing their package: its dependencies
    are missing when a wheel is built.
    """
    package = types.ModuleType("mmengine")
    package.__path__ = [str(HERE / "mmengine")]
    sys.modules.setdefault("mmengine", package)
    sys.path.insert(0, str(HERE))
    from mmengine.native import cache, compile  # This import needs the substitute package.

    return compile, cache


class BuildWithKernels(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode or not self.distribution.has_kernels:
            return
        os.environ.setdefault("MMENGINE_NATIVE_TIMEOUT_S", "1800")  # No request waits during a build.
        compile, cache = native()
        folder = Path(self.build_lib) / "mmengine" / "native" / "built"
        folder.mkdir(parents=True, exist_ok=True)
        for isa in isas():
            print(f"compiling the CPU kernels for {isa}", flush=True)
            compile.compile_for_wheel(compile.find_compiler(), isa, folder / cache.wheel_library_name(isa))


class WithKernels(Distribution):
    """A distribution that is specific to this platform if it includes kernels."""

    @property
    def has_kernels(self) -> bool:
        if not isas():
            return False
        compile, _ = native()
        try:
            compile.find_compiler()
        except Exception as problem:
            print(f"the wheel includes no CPU kernels: {problem}")
            return False
        return True

    def has_ext_modules(self) -> bool:
        return self.has_kernels


setup(cmdclass={"build_py": BuildWithKernels}, distclass=WithKernels)
