"""The kernels' libraries that this machine can compile and run, one for each instruction set."""

import pytest

from mmengine.native.compile import find_compiler
from mmengine.native.cpu import usable_isas
from mmengine.native.errors import NativeKernelsError
from mmengine.native.library import open_isa


def isas() -> list[str]:
    try:
        find_compiler()
        return usable_isas()
    except NativeKernelsError:
        return []


def opened(isa: str):
    """The library, or a skipped test where the system keeps AMX from us."""
    library = open_isa(isa)
    if isa == "amx" and not library.mm_allow_amx():
        pytest.skip("this process may not use AMX")
    return library
