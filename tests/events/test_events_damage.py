"""Tests that a log cut at any byte or with flipped bits gives no wrong record. Every flipped bit is detected,
except a few in packed segments that change no record.
"""

import os
import random

import pytest

from mmengine.errors import CorruptLog
from mmengine.events import retention
from mmengine.events.log import LogReader, LogWriter
from mmengine.events.segment import FOOTER_SIZE
from mmengine.replay import verify
from tests.events.logs import segments
from tests.replay.runs import busy_run

LAST_BYTES = 5000
FLIPS = 2000


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a closed log of about 6,000 bytes, and its records."""
    folder = tmp_path_factory.mktemp("run") / "log"
    busy_run(folder, seed=2, num_requests=8)
    (path,) = segments(folder)
    assert LAST_BYTES < path.stat().st_size < 4 * LAST_BYTES
    return path.read_bytes(), list(LogReader(folder))


def fresh(tmp_path, data):
    folder = tmp_path / "log"
    folder.mkdir(exist_ok=True)
    path = folder / f"{0:020d}.mmlog"
    path.write_bytes(data)
    return folder, path


@pytest.mark.long
def test_a_cut_at_each_of_the_last_bytes(run, tmp_path):
    data, records = run
    folder, path = fresh(tmp_path, data)
    frames = sorted({record.offset for record in records})
    ends = dict(zip(frames, [*frames[1:], len(data) - FOOTER_SIZE]))
    for size in range(len(data) - 1, len(data) - LAST_BYTES - 1, -1):
        os.truncate(path, size)
        reader = LogReader(folder)
        whole = [record for record in records if ends[record.offset] <= size]
        assert list(reader) == whole
        end = ends[whole[-1].offset]
        assert not reader.recovery.is_closed
        torn = reader.torn
        assert (torn is None) == (size == end)
        assert torn is None or (torn.offset, torn.num_bytes) == (end, size - end)


def test_a_cut_log_continues_and_verifies(run, tmp_path):
    data, records = run
    for number, size in enumerate(range(len(data) - LAST_BYTES, len(data), 211)):
        (tmp_path / str(number)).mkdir()
        folder, _ = fresh(tmp_path / str(number), data[:size])
        whole = list(LogReader(folder))
        assert whole == records[: len(whole)]
        writer = LogWriter(folder, reopen="tail")
        for record in records[len(whole) :]:
            writer.append(record.event, record.step, record.mono_ns)
            assert writer.commit()
        writer.close()
        assert [record.event for record in LogReader(folder, "strict")] == [r.event for r in records]
        assert verify(folder).ok


@pytest.mark.long
@pytest.mark.parametrize("closed", [True, False])
def test_flipped_bits(run, tmp_path, closed):
    data, records = run
    if not closed:
        data = data[:-FOOTER_SIZE]
    rng, seen = random.Random(11), {"refused": 0, "cut": 0}
    folder, path = fresh(tmp_path, data)
    for number in range(FLIPS // 2):
        bit = rng.randrange(8 * len(data))
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        reader, got = LogReader(folder), []
        try:
            got += reader
        except CorruptLog as error:
            assert path.name in str(error)
            seen["refused"] += 1
        else:
            assert reader.torn is not None, "the flip was not detected"
            seen["cut"] += 1
        assert got == records[: len(got)]
        if closed and bit // 8 >= len(data) - FOOTER_SIZE:
            assert got == records, "only the footer is damaged"
        if number % 5 == 0:
            assert all(records[record.sequence] == record for record in LogReader(folder, "salvage"))
    assert seen["refused"] > 800 and seen["cut"] > 0


def test_flipped_bits_of_a_packed_segment(run, tmp_path):
    data, records = run
    folder, path = fresh(tmp_path, data)
    retention.pack(path)
    (packed,) = folder.glob("*.zst")
    data, refused, rng = packed.read_bytes(), 0, random.Random(12)
    for _ in range(500):
        bit = rng.randrange(8 * len(data))
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        packed.write_bytes(flipped)
        try:
            assert list(LogReader(folder)) == records, "a few bits in a zstd file have no meaning"
        except CorruptLog:
            refused += 1
    assert refused > 490
