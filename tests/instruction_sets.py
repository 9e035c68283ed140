"""Lists the instruction sets that this machine can compile for and run, and opens their kernel libraries."""

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
    """Return an instruction set's library. Skip the test if the system does not allow AMX."""
    library = open_isa(isa)
    if isa == "amx" and not library.mm_allow_amx():
        pytest.skip("this process may not use AMX")
    return library
