"""Tests the gated delta net's kernels for each instruction set that this CPU has. Results are close to
torch's, and their bits do not depend on chunks, drafts, kept states or other rows.
"""

import random

import numpy as np
import pytest
import torch

from mmengine.native.delta import DeltaSizes
from tests.native.delta_steps import Net, Part

DTYPES = (torch.float32, torch.bfloat16)
SIZES = {
    "blocks of 32 and one of 16": DeltaSizes(2, 4, 24, 48, 4),
    "as published": DeltaSizes(1, 2, 128, 128, 4),
    "odd keys": DeltaSizes(3, 3, 13, 16, 2),
    "tiled heads": DeltaSizes(2, 6, 24, 32, 4, tiled=True),
}
LENGTHS = (60, 23, 41, 1)
KEPT_SLOT = 7


def streams(sizes, dtype):
    """Return (projected, numbers) for each row: the projected inputs, and the inputs for beta and decay."""
    seeded = torch.Generator().manual_seed(3)
    widths = (sizes.width + sizes.values, 2 * sizes.num_heads)
    return [
        tuple(torch.randn(length, width, generator=seeded).to(dtype) for width in widths)
        for length in LENGTHS
    ]


def one_by_one(net, rows):
    """Return each row's outputs when computed alone, token by token."""
    found = []
    for row, (projected, numbers) in enumerate(rows):
        net.begin(row)
        parts = (Part(row, row, projected[i : i + 1], numbers[i : i + 1]) for i in range(len(projected)))
        found.append(torch.cat([net.step([part])[0] for part in parts]))
    return found


def spread(net, rows, seed):
    """Yield (row, first token, outputs) for rows that are computed together in random chunks.

    Some tokens are drafts, and some drafts are accepted. A state of row 0 is kept, and at the end another row
    continues from this state. The other row's outputs are yielded as row 0's, because both must be equal.
    """
    choose = random.Random(seed)
    sure, drafted, kept_at = [0] * len(rows), [0] * len(rows), 0
    for row in range(len(rows)):
        net.begin(row)
    while running := [row for row in range(len(rows)) if sure[row] < len(rows[row][0])]:
        parts, firsts = [], []
        for row in choose.sample(running, choose.randint(1, len(running))):
            projected, numbers = rows[row]
            stayed = choose.randint(0, drafted[row])
            first = sure[row] + stayed
            count = min(choose.choice((1, 1, 3, 30)), len(projected) - first)
            drafts = choose.randint(0, min(count - 1, 4)) if count else 0
            if not count:  # The row has no new tokens: all remaining tokens were accepted drafts.
                sure[row], drafted[row] = first, 0
                continue
            kept = {}
            if row == 0 and not kept_at and first + count - drafts > 20:
                kept_at = choose.randint(max(1, 20 - sure[0]), first + count - drafts - sure[0])
                kept, kept_at = {kept_at: KEPT_SLOT}, sure[0] + kept_at
            chunk = slice(first, first + count)
            parts.append(Part(row, row, projected[chunk], numbers[chunk], stayed, drafts, kept))
            firsts.append((row, first))
            sure[row], drafted[row] = first + count - drafts, drafts
        if parts:
            for (row, first), found in zip(firsts, net.step(parts), strict=True):
                yield row, first, found
    net.begin(5, KEPT_SLOT)
    projected, numbers = rows[0]
    yield 0, kept_at, net.step([Part(5, 5, projected[kept_at:], numbers[kept_at:])])[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SIZES)
def test_rows_have_the_same_bits_as_alone_token_by_token(library, name, dtype):
    sizes, before = SIZES[name], torch.get_num_threads()
    rows, net = streams(sizes, dtype), Net(sizes, dtype, library)
    wanted = one_by_one(net, rows)
    seen = [torch.zeros(length, dtype=torch.bool) for length in LENGTHS]
    try:
        for seed in range(3):
            torch.set_num_threads(1 + seed % 2)
            for row, first, found in spread(net, rows, seed):
                assert torch.equal(found, wanted[row][first : first + len(found)])
                seen[row][first : first + len(found)] = True
    finally:
        torch.set_num_threads(before)
    assert all(each.all() for each in seen)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SIZES)
def test_outputs_are_close_to_torch(library, name, dtype):
    sizes = SIZES[name]
    rows = streams(sizes, dtype)
    wanted = one_by_one(Net(sizes, torch.float32), [tuple(each.float() for each in row) for row in rows])
    for net in (Net(sizes, dtype, library), Net(sizes, dtype)):
        off = [
            (found.float() - wanted[row][first : first + len(found)]).abs().flatten()
            for row, first, found in spread(net, rows, 1)
        ]
        off = torch.cat(off).numpy()
        assert np.quantile(off, 0.99) < (2e-4 if dtype == torch.float32 else 0.2)
        assert np.median(off) < (2e-6 if dtype == torch.float32 else 0.01)
