"""A coverage-guided fuzzer for the reader: python -m tests.events.fuzz_reader FOLDER [libFuzzer options]

The fuzzer's bytes are read as a log segment. The reader must return records or raise CorruptLog, within
bounded memory, and never return two records with the same sequence. The mode `tail` must return all records
that `strict` returns, and `salvage` all records that `tail` returns. The mutator corrects most checksums,
because random changes almost always break them.
"""

import struct
import sys
import zlib
from pathlib import Path

import atheris
import msgspec

with atheris.instrument_imports(include=["mmengine.events", "mmengine.request"]):
    from mmengine.errors import CorruptLog
    from mmengine.events.codec import HEADER, MAGIC
    from mmengine.events.reader import records_of
    from mmengine.events.recovery import Recovery, Walk
    from mmengine.events.segment import FOOTER_SIZE, HEADER_SIZE

HERE = Path(__file__).parent
NAME = Path("00000000000000000000.mmlog")


def read(data: bytes, mode: str) -> tuple[list, bool]:
    """Return the records, and whether the end was reached. Events are bytes, because events with NaN logprobs
    cannot be compared.
    """
    records = []
    try:
        for frame in Walk(NAME, data, Recovery(mode), is_last=True):
            for record in records_of(NAME, data, frame):
                event = msgspec.msgpack.encode(record.event)
                records.append((record.sequence, record.step, record.mono_ns, event))
    except CorruptLog as error:
        text = str(error)
        if not text or "\n" in text or len(text) > 2000:
            raise AssertionError(f"no good line: {text!r}") from None
        return records, False
    return records, True


def check(data: bytes) -> None:
    strict, ended = read(data, "strict")
    tail, tail_ended = read(data, "tail")
    salvage, _ = read(data, "salvage")
    assert not ended or tail_ended and strict == tail
    assert strict == tail[: len(strict)] and tail == salvage[: len(tail)]
    sequences = [sequence for sequence, *_ in salvage]
    assert sequences == sorted(set(sequences))
    assert [sequence for sequence, *_ in tail] == list(range(len(tail)))


def with_checksums(data: bytearray) -> bytearray:
    """Correct the checksums and the lengths in all frames, the header and the footer."""
    if len(data) >= HEADER_SIZE:
        data[HEADER_SIZE - 4 : HEADER_SIZE] = _crc(data[: HEADER_SIZE - 4])
    place = data.find(MAGIC)
    while 0 <= place <= len(data) - HEADER.size:
        end = data.find(MAGIC, place + HEADER.size)
        end = len(data) if end < 0 else end
        struct.pack_into("<I", data, place + 8, end - place - HEADER.size)
        data[place + 4 : place + 8] = _crc(data[place + 8 : end])
        place = data.find(MAGIC, end)
    place = data.find(b"mmlogend")
    if 0 <= place <= len(data) - FOOTER_SIZE:
        data[place + FOOTER_SIZE - 4 : place + FOOTER_SIZE] = _crc(data[place : place + FOOTER_SIZE - 4])
    return data


def _crc(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(4, "little")


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    changed = bytearray(atheris.Mutate(data, max_size))
    return bytes(with_checksums(changed) if seed % 4 else changed)


def write_corpus(folder: Path) -> None:
    """Write the initial segments: the beginnings of two golden logs, and a segment with an event of each
    type.
    """
    from tests.events.logs import one_of_each, segments, write_log

    folder.mkdir(parents=True, exist_ok=True)
    for name in ("mixed", "sessions"):
        (path,) = (HERE.parent / "golden" / name).glob("*.mmlog")
        (folder / name).write_bytes(path.read_bytes()[:4000])
    (path,) = segments(write_log(folder / "log", one_of_each()))
    path.rename(folder / "each")
    (folder / "log" / "lock").unlink()
    (folder / "log").rmdir()


def main() -> None:
    corpus = Path(sys.argv[1])
    write_corpus(corpus)
    options = ["-max_len=6000", "-rss_limit_mb=2048", "-timeout=10", *sys.argv[2:]]
    atheris.Setup([sys.argv[0], str(corpus), *options], check, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
