"""Tests damaged GGUF files: truncated, with an overwritten header field, or with bytes changed at random. The
reader must refuse invalid files with a one-line ModelError, and use little memory.
"""

import random
import struct
import tracemalloc

import numpy as np
import pytest

from mmengine.checkpoint.gguf.model import GGUFModel
from mmengine.errors import ModelError
from tests.gguf.writing import (
    ARRAY,
    HALVES,
    STRING,
    UINT32,
    Written,
    model,
    tensor,
    vocabulary,
    weights,
    write,
)

FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
# Limit in bytes for reading a file of 0.1 MB, including its vocabulary and all tensors.
MEMORY = 4 * 2**20
WILD = {
    1: (0, 1, 7, 127, 128, 255),
    4: (0, 1, 3, 8, 9, 31, 33, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1),
    8: (0, 1, 7, 8, 31, 33, 255, 2**16, 2**20, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1),
}


def sound() -> Written:
    keys = [("general.alignment", UINT32, 32), *model(), *vocabulary()]
    keys += [
        ("tokenizer.chat_template", STRING, "{{ messages }}"),
        ("general.tags", ARRAY, (STRING, ["a", "b"])),
    ]
    others = [tensor(f"other.{kind}", kind, (2, 256), seed) for seed, kind in enumerate(HALVES)]
    return write(keys, [*weights("Q4_1"), *others])


SOUND = sound()


def refused(path, measures: bool = True) -> bool:
    """Return whether the reader refuses the file. `measures`: also check the memory used, which takes
    longer.
    """
    return measured(read, path, MEMORY) if measures else read(path)


def measured(read, path, limit: int) -> bool:
    """Return `read(path)`. Fails if the call needs `limit` bytes or more."""
    tracemalloc.start()
    try:
        found = read(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < limit, f"{peak} bytes"
    return found


def read(path) -> bool:
    """Return whether the reader refuses the file. If not, check that the tensors lie inside the file and do
    not overlap.
    """
    try:
        opened = GGUFModel(path)
        for name in FILES:
            opened.file(name)
        entries = opened.tensors(lambda name: name)
        ends = [0]
        for entry in sorted(entries.values(), key=lambda entry: entry.start):
            assert ends[-1] <= entry.start and entry.start + entry.num_bytes <= path.stat().st_size
            ends.append(entry.start + entry.num_bytes)
            pieces = [values.shape for _, values in entry.pieces(0, entry.shape[0])]
            assert sum(shape[0] for shape in pieces) == entry.shape[0]
            if entry.coding is not None:
                parts = [rows.codes.shape for _, rows in entry.coded(0, entry.shape[0])]
                assert sum(shape[0] for shape in parts) == entry.shape[0]
            if entry.blocks is not None:
                rows = [rows.shape for _, rows in entry.block_rows(0, entry.shape[0])]
                assert sum(count * size for count, size in rows) == entry.num_bytes
    except ModelError as error:
        assert str(error).startswith(str(path)) and "\n" not in str(error) and len(str(error)) < 600
        return True
    return False


@pytest.fixture
def path(tmp_path):
    found = tmp_path / "model.gguf"
    found.write_bytes(SOUND.data)
    return found


def test_the_valid_file_is_read(path):
    assert not refused(path)


def test_cut_off_anywhere(path):
    """Truncate the file at 600 random bytes of the header and the data."""
    header = max(start + size for _, start, size in SOUND.spans)
    places = [*range(header + 40), *range(header + 40, len(SOUND.data), 97), len(SOUND.data) - 1]
    rng = random.Random(1)
    for number, place in enumerate(sorted(rng.sample(places, 600))):
        path.write_bytes(SOUND.data[:place])
        assert refused(path, measures=number % 5 == 0), place


def written_over(name: str, start: int, size: int, rng: random.Random) -> list[bytes]:
    if size in WILD and not name.startswith(("key ", "name of ")):
        return [value.to_bytes(size, "little") for value in (*WILD[size], rng.randrange(256**size))]
    return [rng.randbytes(size), bytes(size), b"\xff" * size] if size else []


def each_field() -> list[tuple[str, int, int]]:
    """Return (name, start, size) of header fields. A long list contributes only its first two entries and its
    last entry. A tensor named `other.KIND` contributes only its type.
    """
    found, seen = [], {}
    for name, start, size in SOUND.spans:
        if " other." in name and not name.startswith("type of"):
            continue
        family = name.rsplit(" ", 1)[0] if name[-1].isdigit() else name
        seen[family] = seen.get(family, 0) + 1
        if seen[family] <= 2 or name.endswith((" 262", "260")):
            found.append((name, start, size))
    return found


@pytest.mark.parametrize("part", range(4))
def test_every_field_of_the_header_written_over(path, part):
    rng, count, tried = random.Random(f"field {part}"), 0, 0
    for name, start, size in each_field()[part::4]:
        for value in written_over(name, start, size, rng):
            data = bytearray(SOUND.data)
            data[start : start + size] = value
            path.write_bytes(data)
            count += refused(path, measures=rng.random() < 0.15)
            tried += 1
    assert tried > 300 and tried // 2 < count < tried, f"{count} of {tried}"


def damaged(rng: random.Random, header: int) -> bytes:
    """Return the valid file after random changes at 1 to 40 places, mostly in the header: bytes are changed,
    removed or repeated.
    """
    data = bytearray(SOUND.data)
    for _ in range(rng.choice((1, 1, 2, 5, 40))):
        place = rng.randrange(header if rng.random() < 0.9 else len(data))
        kind = rng.randrange(5)
        if kind == 0:
            data[place] = rng.randrange(256)
        elif kind == 1:
            data[place] ^= 1 << rng.randrange(8)
        elif kind == 2:
            struct.pack_into("<Q", data, min(place, len(data) - 8), rng.choice(WILD[8]))
        elif kind == 3:
            del data[place : place + rng.randrange(1, 20)]
        else:
            data[place:place] = data[place : place + rng.randrange(1, 20)]
    return bytes(data)


def damage_at_random(path, count: int, seed: int) -> None:
    header, rng = max(start + size for _, start, size in SOUND.spans), random.Random(seed)
    found = 0
    for number in range(count):
        path.write_bytes(damaged(rng, header))
        found += refused(path, measures=number % 5 == 0)
    assert 0.3 * count < found < count


def test_damage_at_random(path):
    damage_at_random(path, 250, 1)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 10))
def test_much_damage_at_random(path, seed):
    damage_at_random(path, 4_000, seed)


def test_a_file_that_is_not_gguf_is_refused(path):
    rng = random.Random(4)
    for size in (0, 1, 3, 4, 23, 24, 100, 4096):
        for beginning in (b"", b"GGUF", b"GGUF\3\0\0\0"):
            for rest in (rng.randbytes(size), bytes(size)):
                path.write_bytes((beginning + rest)[:size])
                assert refused(path)


def test_overlaps_of_any_two_tensors_are_refused(path):
    offsets = {
        name.removeprefix("offset of "): at for name, at, _ in SOUND.spans if name.startswith("offset of ")
    }
    tensors = GGUFModel(path).container.tensors
    base = min(tensor.start for tensor in tensors.values())
    rng, size = np.random.default_rng(2), len(SOUND.data)
    names = list(offsets)
    for _ in range(200):
        moved, over = rng.choice(names, 2, replace=False)
        target, own = tensors[over], tensors[moved].num_bytes
        low, high = max(base, target.start - own + 1), target.start + target.num_bytes
        places = [
            at
            for at in range(-(-low // 32) * 32, high, 32)
            if at + own <= size and at != tensors[moved].start
        ]
        if not places:
            continue
        data = bytearray(SOUND.data)
        struct.pack_into("<Q", data, offsets[moved], int(rng.choice(places)) - base)
        path.write_bytes(data)
        with pytest.raises(ModelError, match="overlap"):
            GGUFModel(path)
