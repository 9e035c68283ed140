"""Tests that a media item's tensors are packed into rows of bytes and unpacked again."""

import numpy as np
import pytest

from mmengine_transformers.media.packing import ROW_BYTES, pack, read_header, unpack

PIXELS = np.arange(2 * 3 * 700, dtype=np.float32).reshape(2, 3, 700)
ITEMS = (
    ("<image>" * 4, 4, {"pixel_values": ("float32", PIXELS), "image_sizes": ("int64", np.array([[5, 7]]))}),
    ("ab<image>", 1, {"mask": ("bool", np.array([True, False, True]))}),
    ("", 0, {"pixel_values": ("bfloat16", np.array([[1, 2, 0xBF80]], np.uint16))}),
)


def test_items_come_back_as_they_were():
    rows = np.concatenate([pack(*item) for item in ITEMS])
    assert rows.dtype == np.uint8 and rows.shape[1] == ROW_BYTES
    found = list(unpack(rows))
    assert sum(item.num_rows for item in found) == len(rows)
    for (text, num_embeds, tensors), item in zip(ITEMS, found, strict=True):
        assert (item.header.text, item.header.num_embeds) == (text, num_embeds)
        assert [(each.name, each.dtype) for each in item.header.tensors] == [
            (name, dtype) for name, (dtype, _) in tensors.items()
        ]
        for name, (_, values) in tensors.items():
            assert item.arrays[name].dtype == values.dtype and np.array_equal(item.arrays[name], values)


def test_the_same_item_has_the_same_bytes():
    assert np.array_equal(pack(*ITEMS[0]), pack(*ITEMS[0]))
    other = pack(ITEMS[0][0], 5, ITEMS[0][2])
    assert not np.array_equal(pack(*ITEMS[0]), other)


@pytest.mark.parametrize("place", [0, 8, 12, 20, 30])
def test_damaged_rows_are_refused(place):
    rows = pack(*ITEMS[0])
    rows.reshape(-1)[place] ^= 0xFF
    with pytest.raises(ValueError, match=r"packed"):
        read_header(rows)


def test_rows_that_are_cut_short_are_refused():
    with pytest.raises(ValueError, match="sizes"):
        list(unpack(pack(*ITEMS[0])[:-1]))
