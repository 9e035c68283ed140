"""Blocks go to the host and come back beside the computation: however late a copy runs, nothing is lost."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmengine.models.plugin import ModelSpec
from mmengine.runtime.kv import KVPool
from mmengine.runtime.swap import runs

BLOCKS, HOST = 7, 5
SPEC = ModelSpec(2, 2, 1, 4, 8, 100, 64, 0, 8)


class Late:
    """Copies run as late as may be: when the computation waits for them, or never."""

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
    """Pairs in which no block comes twice on either side."""
    count = draw(st.integers(1, min(sources, targets)))
    left = draw(st.permutations(range(sources)))[:count]
    right = draw(st.permutations(range(targets)))[:count]
    return list(zip(left, right, strict=True))


@st.composite
def steps(draw):
    """Steps of copies, each with the block that the layers write to afterwards."""
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


@given(steps())
def test_the_latest_copies_change_nothing(plans):
    pool = KVPool(SPEC, BLOCKS, 4, torch.float32, torch.device("cpu"), HOST, beside=Late())
    device, host = [0.0] * BLOCKS, [0.0] * HOST
    for number, (plan, written) in enumerate(plans, 1):
        pool.copy(plan)
        ways = {"swap_out": (device, host), "copy": (device, device), "swap_in": (host, device)}
        for name, (source, target) in ways.items():
            for left, right in getattr(plan, name) if getattr(plan, name) is not None else ():
                target[right] = source[left]
        pool.blocks[:, written] = float(number)  # what the layers do
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
