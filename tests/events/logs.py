"""Writes logs for tests."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from mmengine.events import vocabulary as ev
from mmengine.events.codec import Record
from mmengine.events.log import LogReader, LogWriter
from mmengine.events.retention import drop
from mmengine.events.segment import Header, first_sequence_of, segment_name, segment_paths
from mmengine.events.writer import SEGMENT_BYTES
from mmengine.request import Adapter, MediaItem, SamplingParams


def column(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


def one_of_each() -> list[ev.Event]:
    item = MediaItem(b"\x07" * 32, "video", ((1, 2), (5, 2)), (2, 2, 4))
    encode = ((b"key", 0, 0),)
    return [
        ev.Started(1, "0.1.0", 1, {"max_num_seqs": 4}, {"weights": "none"}, 9),
        ev.Queued("a", column(1, 2, 3), SamplingParams(seed=1), (item,), 1, -1, "salt", 10**9),
        ev.Queued("b", column(4), SamplingParams(stop=("ü",), logit_bias={3: -1.5})),
        ev.Scheduled(column(0, 2), column(3, 1), column(4, 5), encode, (b"old",)),
        ev.Scheduled(None, None),
        ev.Admitted("b", 1, 1, column(3), column(6), encode, (b"old",)),
        ev.AdmittedWithState("c", 2, 1, column(3), column(7), state_slot=4, state_from=1, num_shared=8),
        ev.AdapterLoaded(Adapter(b"adapter", 5000, True, "mine"), "/adapters/mine"),
        ev.AdmittedWithAdapter("d", 3, 1, column(4), column(8), adapters_out=(b"other",)),
        ev.AdapterUnloaded("mine"),
        ev.StatesKept(column(2), column(16), column(3)),
        ev.Executed(column(8, 9), ((0, "eos"),), ((1, "NaN"),), ((0, ((8, -0.5), (1, -2.0))),), 12345),
        ev.Failed("out of memory"),
        ev.Preempted("b", 1, "recompute", "no free blocks"),
        ev.Cancelled("a", "deadline"),
        ev.Finished("a", "abort", "deadline"),
        ev.Delivered("a"),
        ev.CacheReset(),
        ev.Evicted((b"key",), (b"old",)),
        ev.Encoded("a", 0, 7, (b"old",)),
        ev.Dispatched(),
        ev.Offered("a", 3, ((0, b"12345678"),)),
        ev.Fetched("a", column(1), column(2, 3)),
        ev.Arrived("a", b"12345678"),
        ev.Lost("a", "deadline"),
        ev.SessionOpened("s", "salt", 10**9, b"kept"),
        ev.Appended("s", "a", 3, 1, True),
        ev.Leased("s", 1, column(5, 6)),
        ev.LeaseTaken("s", 1, "no free blocks"),
        ev.SessionClosed("s", "idle"),
        ev.Recovered(
            (3, 4), "tail", (("0.mmlog", 99, 7),), (("a", "its image is lost"),), {"dtype": "x"}, "1"
        ),
        ev.Checkpoint(b"\x01" * 16),
    ]


def write_log(folder: Path, events: Iterable[ev.Event], *, segment_bytes: int = SEGMENT_BYTES) -> Path:
    """Write the events to a log in `folder`, with a commit for each event. Segments are not packed."""
    writer = LogWriter(folder, segment_bytes=segment_bytes, pack_full=False)
    for number, event in enumerate(events):
        writer.append(event, number // 3, 1000 + number)
        assert writer.commit()
    writer.close()
    return folder


def rewrite(records: Iterable[Record], folder: Path) -> Path:
    """Write the records to a new log, with new sequence numbers and correct checksums."""
    writer = LogWriter(folder)
    for record in records:
        writer.append(record.event, record.step, record.mono_ns)
    writer.close()
    return folder


def drop_first(folder: Path, count: int) -> None:
    """Delete the first segments, as retention does."""
    *gone, first = segment_paths(folder)[: count + 1]
    drop(folder, gone, first_sequence_of(first))


def read_events(folder: Path) -> list[ev.Event]:
    return [record.event for record in LogReader(folder)]


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.mmlog"))


def begin_log(folder: Path) -> None:
    """Write a log that contains only the first segment's header."""
    folder.mkdir(exist_ok=True)
    (folder / segment_name(0)).write_bytes(Header(0, 1, 1, "0").pack())
