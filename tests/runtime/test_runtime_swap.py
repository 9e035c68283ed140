"""Tests of swapping blocks to the host and back: no data is lost, however late a copy runs."""

import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmengine.models.plugin import ModelSpec
from mmengine.runtime.device import cuda
from mmengine.runtime.device.cpu import CpuDevice
from mmengine.runtime.kv import swap
from mmengine.runtime.kv.pool import KVPool
from mmengine.runtime.kv.swap import runs

BLOCKS, HOST = 7, 5
SPEC = ModelSpec(2, 2, 1, 4, 8, 100, 64, 0, 8)


class Late:
    """A CopyStream that runs copies as late as possible: when `join` is called, or never."""

    def __init__(self):
        self.waiting = []

    def run(self, copies, staged):
        self.waiting.append(copies)

    def join(self):
        for copies in self.waiting:
            copies()
        self.waiting.clear()


class Plan:
    swap_out = copy = swap_in = None

    def __init__(self, **copies):
        for name, pairs in copies.items():
            setattr(self, name, np.array(pairs, np.int32))


def one_to_one(draw, sources, targets):
    """Return (source, target) pairs in which all sources differ and all targets differ."""
    count = draw(st.integers(1, min(sources, targets)))
    left = draw(st.permutations(range(sources)))[:count]
    right = draw(st.permutations(range(targets)))[:count]
    return list(zip(left, right, strict=True))


@st.composite
def steps(draw):
    """Return (a plan's copies, the block that the layers write afterwards) for each step."""
    found = []
    for _ in range(draw(st.integers(1, 8))):
        copies = {}
        if draw(st.booleans()):
            copies["swap_out"] = one_to_one(draw, BLOCKS, HOST)
        if draw(st.booleans()):
            copies["copy"] = [draw(st.permutations(range(BLOCKS)))[:2]]
        if draw(st.booleans()):
            copies["swap_in"] = one_to_one(draw, HOST, BLOCKS)
        found.append((Plan(**copies), draw(st.integers(0, BLOCKS - 1))))
    return found


@given(steps(), st.integers(1, HOST))
def test_the_latest_copies_change_nothing(plans, per_slab):
    block_bytes = 2 * 2 * 4 * 1 * 4 * 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(swap, "SLAB_BYTES", per_slab * block_bytes)
        pool = KVPool(SPEC, BLOCKS, 4, torch.float32, CpuDevice(), HOST, copy_stream=Late())
    assert [len(slab) for slab in pool._host._slabs[:-1]] == [per_slab] * (-(-HOST // per_slab) - 1)
    device, host = [0.0] * BLOCKS, [0.0] * HOST
    for number, (plan, written) in enumerate(plans, 1):
        pool.copy(plan)
        ways = {"swap_out": (device, host), "copy": (device, device), "swap_in": (host, device)}
        for name, (source, target) in ways.items():
            for left, right in getattr(plan, name) if getattr(plan, name) is not None else ():
                target[right] = source[left]
        pool.blocks[:, written] = float(number)  # as the layers write KV
        device[written] = float(number)
        assert [sorted(set(pool.blocks[:, block].flatten().tolist())) for block in range(BLOCKS)] == [
            [value] for value in device
        ]


@given(st.sets(st.integers(0, 40), min_size=1))
def test_neighbours_in_host_memory_are_one_copy(blocks):
    blocks = sorted(blocks)
    found = runs(np.array(blocks, np.int32))
    assert [block for begin, end, host in found for block in range(host, host + end - begin)] == blocks
    assert all(after[2] > before[2] + before[1] - before[0] for before, after in zip(found, found[1:]))
    assert [begin for begin, _, _ in found] + [len(blocks)] == [0] + [end for _, end, _ in found]


class Stream:
    def __init__(self, name, order):
        self.name, self._order, self._events = name, order, 0

    def wait_stream(self, other):
        self._order.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self._order.append(f"{self.name} waits for copy {event.number}")

    def record_event(self):
        self._events += 1
        return Event(self._events)


class Event:
    done = 0  # number of copies that ran

    def __init__(self, number):
        self.number = number

    def query(self):
        return self.number <= Event.done


def test_staged_blocks_are_kept_until_copied_and_limited(monkeypatch):
    order = []
    side, usual = Stream("side", order), Stream("usual", order)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: usual)
    monkeypatch.setattr(cuda, "MOST_STAGED", 3 * 4)
    beside = cuda.CudaCopyStream(torch.device("cuda"))
    kept = []

    def run(count):
        staged = torch.zeros(count, dtype=torch.uint8)
        kept.append(weakref.ref(staged))
        beside.run(lambda: order.append(f"copies {len(kept)}"), staged)

    for _ in range(3):
        run(4)
    assert order == [f"{each}" for n in (1, 2, 3) for each in ("side waits for usual", f"copies {n}")]
    assert all(ref() is not None for ref in kept)
    order.clear()
    run(4)
    assert order == ["side waits for usual", "copies 4", "usual waits for copy 1"]
    assert [ref() is not None for ref in kept] == [False, True, True, True]
    monkeypatch.setattr(Event, "done", 3)
    run(20)  # more bytes than may be staged at the same time, so the computation waits
    assert [ref() is not None for ref in kept] == [False] * 5 and order[-1] == "usual waits for copy 5"
    run(4)
    beside.join()
    assert order[-1] == "usual waits for side" and kept[-1]() is None
