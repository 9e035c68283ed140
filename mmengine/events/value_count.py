"""Counts the values in a msgpack body before they are decoded.

Three msgpack bytes can become a hundred bytes in Python, so a body with many megabytes of tiny values would
not fit into memory. An engine's large events have long columns, which are one value each.
"""

import struct

LARGE = 2**20  # bytes; smaller bodies are not counted
MAX_VALUES = 8 * 2**20


def _sizes() -> list[int]:
    """Return a value's size in bytes by its first byte; 0: the length follows that byte."""
    sizes = [1] * 256
    sizes[0xA0:0xC0] = range(1, 33)  # short strings
    for first, size in ((0xC4, 0), (0xCA, 5), (0xCB, 9), (0xCC, 2), (0xCD, 3), (0xCE, 5), (0xCF, 9)):
        sizes[first] = size
    for first, size in ((0xC5, 0), (0xC6, 0), (0xD0, 2), (0xD1, 3), (0xD2, 5), (0xD3, 9), (0xD9, 0)):
        sizes[first] = size
    for first, size in ((0xDA, 0), (0xDB, 0), (0xDC, 3), (0xDD, 5), (0xDE, 3), (0xDF, 5)):
        sizes[first] = size
    return sizes


_SIZES = _sizes()
_U8, _U16, _U32 = struct.Struct(">B"), struct.Struct(">H"), struct.Struct(">I")
_LENGTHS = {0xC4: _U8, 0xC5: _U16, 0xC6: _U32, 0xD9: _U8, 0xDA: _U16, 0xDB: _U32}


def has_too_many_values(body: bytes | memoryview) -> bool:
    """Return whether a large body holds more than MAX_VALUES values. For bytes that are no msgpack the answer
    is arbitrary.
    """
    if len(body) <= LARGE:
        return False
    place, count, end, sizes = 0, 0, len(body), _SIZES
    while place < end:
        size = sizes[body[place]]
        if not size:
            form = _LENGTHS[body[place]]
            if place + 1 + form.size > end:
                return False
            size = 1 + form.size + form.unpack_from(body, place + 1)[0]
        place += size
        count += 1
        if count > MAX_VALUES:
            return True
    return False
