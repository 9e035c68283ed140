"""Loads the library with the CPU kernels into this process, or records why the kernels are off."""

import ctypes
import logging
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mmengine.native.cache import cache_folder, ensure_compiled, library_name, wheel_library_name
from mmengine.native.compile import BUILT, compile_library, openmp_library
from mmengine.native.cpu import usable_isas
from mmengine.native.errors import NativeKernelsError

SWITCH = "MMENGINE_NATIVE"
_log = logging.getLogger("mmengine.native")


@dataclass(frozen=True, slots=True)
class LibraryStatus:
    """The loaded library, or None. If the library is None, `text` states the reason."""

    library: ctypes.CDLL | None
    text: str  # one line for the user


def load() -> ctypes.CDLL | None:
    """Return the library, or None if no library can be loaded.

    Without a library, torch computes instead, and a warning of the logger `mmengine.native` states the
    reason. Each module that calls functions of the library declares their argument types.
    """
    return _status().library


def describe() -> str:
    """Return a line for the user: which library is used, or why none is used."""
    return _status().text


def forget() -> None:
    """Make the next call search for the library again, for example after changing environment variables."""
    _status.cache_clear()


@cache
def _status() -> LibraryStatus:
    if os.environ.get(SWITCH, "").lower() in ("off", "0", "no"):
        return LibraryStatus(None, f"off: {SWITCH}={os.environ[SWITCH]}")
    try:
        return _open_best_isa()
    except NativeKernelsError as problem:
        _log.warning("CPU kernels are off, so torch computes, which is slower: %s", problem)
        return LibraryStatus(None, f"off: {problem}")


def _open_best_isa() -> LibraryStatus:
    for isa in usable_isas():
        library = open_isa(isa)
        if isa != "amx" or library.mm_allow_amx():
            threads = "OpenMP" if openmp_library() else "one thread"
            return LibraryStatus(library, f"{isa}, {threads}, {os.path.realpath(library._name)}")
    raise NativeKernelsError("the operating system does not let this process use AMX")


def _open_wheel_library(isa: str, openmp: Path | None) -> ctypes.CDLL | None:
    """Load the library from the wheel.

    Returns None if the wheel has no library for `isa`, or if the library does not load, for example because
    libstdc++ is too old.
    """
    path = BUILT / wheel_library_name(isa)
    if openmp is None or not path.exists():
        return None
    try:
        ctypes.CDLL(str(openmp), mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(path))
    except OSError as error:
        _log.warning("the wheel's kernels do not load and are compiled on this machine: %s", error)
        return None


def open_isa(isa: str) -> ctypes.CDLL:
    """Load the library for an instruction set that this CPU supports. Raises NativeKernelsError.

    The kernels for "amx" may run only after the library's function `mm_allow_amx()` has returned 1.
    """
    openmp = openmp_library()
    if (built := _open_wheel_library(isa, openmp)) is not None:
        return built
    folder, name = cache_folder(), library_name(isa, openmp)
    ensure_compiled(folder, name, lambda compiler, out: compile_library(compiler, isa, openmp, out))
    try:
        if openmp is not None:
            ctypes.CDLL(str(openmp), mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(folder.loadable(name))
    except OSError as error:
        raise NativeKernelsError(f"{folder.path / name} does not load: {error}") from None
